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
func newCertificates(d daemon, p *parts, ds *datastore, c etcd.Config) (certs *renewal.Certificates) {
	client := renewal.Files{Expires: c.Expiry, CA: c.CAFile}
	now := func() renewal.Files {
		server := ds.member.Server()
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
	log := d.of("certificates")
	var failed func() error
	if d.Datastore.CertFile != "" {
		renewer := renewal.NewRenewer(renewal.Config{
			Records: ds.etcd.Renewals(), Credentials: c, Ours: embedded.Issued, Replaced: func() { certs.Reread() }, Log: log, // it is made next
		})
		failed = renewer.Err
		p.runs("certificate", renewer.Run)
	}
	// Who asks for another certificate is answered while this host is a member that serves others. Of several members one is first.
	p.runs("certificates of others", func(ctx context.Context) error {
		return ds.member.WhileServing(ctx, func(ctx context.Context, server *embedded.Server) error {
			return renewal.NewSigner(ds.etcd.Renewals(), server, log, time.Now).Run(ctx)
		})
	})
	certs = renewal.NewCertificates(now, failed)
	return certs
}
