package etcd

import "time"

// SetPageTimeout shortens what one page of a state may take.
func (s *Store) SetPageTimeout(d time.Duration) { s.pageTimeout = d }

// SetHistoryCheck shortens the pause between two looks at whether the datastore is the
// same one.
func (s *Store) SetHistoryCheck(d time.Duration) { s.historyCheck = d }

// SetRightsCheck shortens the pause between two looks at whether what might not be read
// may be.
func (s *Store) SetRightsCheck(d time.Duration) { s.rightsCheck = d }
