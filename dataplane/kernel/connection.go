package kernel

import (
	"log/slog"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// connection is the socket of our requests. One that breaks is replaced, and then
// everything is to be listed: what became of the last requests is not known.
type connection struct {
	transport
	ns      *namespace
	lis     *listener // to which our own changes are no news
	listing *listing
	log     *slog.Logger
}

// redial replaces a connection that broke.
func (c *connection) redial(why error) {
	c.listing.ask("connection broken")
	c.log.Warn("connection to the kernel broken, opening another", "error", why)
	var fresh *nl.Conn
	err := c.ns.do(func() (err error) {
		fresh, err = dialConn()
		return err
	})
	if err == nil {
		if err = c.lis.ignore(fresh.Port()); err != nil {
			fresh.Close()
		}
	}
	if err != nil {
		c.log.Error("connection to the kernel cannot be opened", "error", err)
		return // the old one is tried again with the next listing
	}
	if r, ok := c.transport.(interface{ replace(*nl.Conn) }); ok {
		r.replace(fresh)
		return
	}
	c.Close()
	c.transport = fresh
}
