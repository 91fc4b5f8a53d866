// Package service tests bin/routerd under what configs/systemd/routerd.service
// leaves it.
package service
