package member

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// besideWithin is how long the other members have for their answer.
const besideWithin = 5 * time.Second

// Beside returns the other members of the datastore, by host, if they have it without this one: more than half of all are up.
// Otherwise it returns none. This host's daemon need not run.
func Beside(ctx context.Context, c MembershipConfig) ([]string, error) {
	known := map[string]etcd.MemberRecord{}
	b, err := os.ReadFile(c.MembersFile)
	if err == nil {
		err = json.Unmarshal(b, &known)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("where the datastore's other members are: %s: %w", c.MembersFile, err)
	}
	delete(known, c.Node)
	endpoints := etcd.EndpointsOf(known)
	if len(endpoints) == 0 {
		return nil, nil
	}
	ds := c.Datastore
	if ds.CAFile == "" {
		ds.CAFile, ds.CertFile, ds.KeyFile = embedded.ClientFiles(c.PKIDir)
	}
	ctx, cancel := context.WithTimeout(ctx, besideWithin)
	defer cancel()
	s, err := etcd.Open(ctx, etcd.Config{Endpoints: endpoints, CAFile: ds.CAFile, CertFile: ds.CertFile, KeyFile: ds.KeyFile, Logger: c.Log})
	if err != nil {
		return nil, fmt.Errorf("ask the datastore's other members: %w", err)
	}
	defer s.Close()                           //nolint:errcheck // nothing was written
	if _, err := s.Members(ctx); err != nil { // its answer wants more than half of them (etcd: linearizable)
		return nil, nil //nolint:nilerr // they have it not, then
	}
	return slices.Sorted(maps.Keys(known)), nil
}
