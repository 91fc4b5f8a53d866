package main

import (
	"context"
	"time"

	"github.com/routerd/routerd/control/renewal"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// newCertificates makes what looks after the certificates of the datastore: of the one
// that this host serves, and of this host as a client. Which of them counts changes when
// it becomes a member, or leaves.
func (d *router) newCertificates(s *etcd.Store, c etcd.Config) {
	client := renewal.Files{Expires: c.Expiry, CA: c.CAFile}
	now := func() renewal.Files {
		server := d.member.Server()
		if server == nil || !server.Listen().IsValid() {
			return client
		}
		ca, cert := server.ServerFiles()
		return renewal.Files{CA: ca, Serves: true, Expires: func() (string, time.Time, error) {
			if err := server.CertificateError(); err != nil {
				return cert, time.Time{}, err
			}
			return etcd.Config{CAFile: ca, CertFile: cert}.Expiry()
		}}
	}
	log := d.log.With("component", "certificates")
	var failed func() error
	if d.cfg.Datastore.CertFile != "" {
		d.renewer = renewal.NewRenewer(renewal.Config{
			Records: s.Renewals(), Credentials: c, Ours: embedded.Issued, Replaced: func() { d.certs.Reread() }, Log: log, // it is made next
		})
		failed = d.renewer.Err
	}
	d.certs = renewal.NewCertificates(now, failed)
	d.renewals = s.Renewals()
}

// signCertificates answers who asks for another certificate, while this host is a member
// of the datastore that serves others. Of several members one is first.
func (d *router) signCertificates(ctx context.Context) error {
	return d.member.WhileServing(ctx, func(ctx context.Context, server *embedded.Server) error {
		return renewal.NewSigner(d.renewals, server, d.log.With("component", "certificates"), time.Now).Run(ctx)
	})
}
