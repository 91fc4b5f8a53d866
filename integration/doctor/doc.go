// Package doctor breaks labs of real daemons, one thing after the other, and holds
// that routerctl doctor names it in its first line, and says nothing of a lab that is
// well. docs/operations/doctor.md has the list.
package doctor
