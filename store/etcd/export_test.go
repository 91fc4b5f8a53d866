package etcd

import "time"

// SetPageTimeout shortens what one page of a state may take.
func (s *Store) SetPageTimeout(d time.Duration) { s.pageTimeout = d }
