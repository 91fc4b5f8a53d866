// Package scenarios holds tests of whole labs: real daemons, the real CNI
// plugin, real packets. They run as root and need the programs of "make build",
// in ../../bin or where ROUTERD_BIN says.
//
// The scenarios of TestModes run once for each encapsulation: for those named
// in ROUTERD_MODES (separated by commas), else for those whose device this
// kernel has. With ROUTERD_STAGE=vm, inside the virtual machine, the modes are
// those of IP in IP, which the machines that build routerd may lack, and the
// tests are those that need them. Each run prints what its stage covers.
package scenarios
