// Package runtimes has nodes whose runtime speaks CNI 1.1: it asks the plugin whether the network is there, and
// says which attachments are.
package runtimes
