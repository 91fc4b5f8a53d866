// Package packages tests the packages of `make package` under a real systemd:
// its tests run in a machine of bin/vmrun --systemd (`make test-package`), and
// nowhere else.
package packages
