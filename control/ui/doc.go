// Package ui serves the page: the cluster as this host knows it, for an operator's browser.
//
// The page only reads. What it shows of routes, policies, events and the doctor is what the operator's API answers
// routerctl, in the same JSON; the picture of the topology and the map of the pools are computed here, by pure
// functions, so that the browser has nothing to do but to draw.
//
// Whoever opens it shows a token that the daemon's socket gave out, once, and has a cookie from then on. The page is
// served on a loopback address or a unix socket alone.
package ui
