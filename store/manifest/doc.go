// Package manifest reads and prints resources as operators write them: YAML or
// JSON, one document or many, single objects or lists.
//
// Reading is strict and complete. A field that nobody knows, a value of the
// wrong type, a key given twice, an object given twice, and every rule that
// store.Validate knows: all are reported, of all documents, in one go, each
// with file, line, document, object and field. An input with an error yields
// no document at all.
//
// One thing is deliberately not an error: fields that newer versions of Calico
// have and the pinned API module does not. They are kept as they are and reach
// the store, so that a manifest written for Calico works here too.
package manifest
