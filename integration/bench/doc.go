// Package bench measures routerd beside references that do the same work in
// the same run. docs/performance.md says how to read the table.
package bench
