// Package ui opens the page of a host in a real browser: what it draws of a lab of real daemons, that it follows what
// happens there, and that it can be used without a mouse.
package ui
