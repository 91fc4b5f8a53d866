// Package history holds what a BGP speaker sends to one peer to the rules that every such
// history keeps, message by message, and folds it to what the peer has in the end. It is for
// tests: of models and fuzzing, and of sessions with real sockets.
package history
