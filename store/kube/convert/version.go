package convert

// Version numbers what [Source.Read] makes of the objects of an API. A program goes on
// from what another one has on disk where both have the same number, and reads the
// cluster anew where they do not: raise it when Read makes anything else of an object
// than before, refuses one that it took, or takes one that it refused. TestVersion asks
// for it.
const Version = 2
