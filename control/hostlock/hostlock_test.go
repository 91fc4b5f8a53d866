package hostlock

import "testing"

func TestLockHolder(t *testing.T) {
	t.Parallel()
	const locks = `1: POSIX  ADVISORY  WRITE 11 00:1a:4711 0 EOF
2: FLOCK  ADVISORY  WRITE 12 00:1a:47 0 EOF
3: FLOCK  ADVISORY  WRITE 0 00:1a:4712 0 EOF
3: -> FLOCK  ADVISORY  WRITE 14 00:1a:4713 0 EOF
4: FLOCK  ADVISORY  WRITE 13 00:1a:4711 0 EOF
5: FLOCK
`
	for inode, want := range map[uint64]int{4711: 13, 47: 12, 4712: 0, 4713: 0, 1: 0} {
		if got := lockHolder([]byte(locks), inode); got != want {
			t.Errorf("inode %d: %d, want %d", inode, got, want)
		}
	}
}
