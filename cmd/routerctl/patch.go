package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// patching is a change of one object by a patch.
type patching struct {
	patch  []byte // JSON
	kind   string // merge, strategic or json
	dryRun bool
	force  bool
}

func (a resourceCommands) patchCommand() *cobra.Command {
	var p patching
	var text, namespace string
	c := &cobra.Command{
		Use:   "patch KIND NAME -p PATCH",
		Short: "Change some fields of a resource",
		Long: `Change some fields of a resource with a patch in JSON or YAML. The result is checked
as with apply.

Types: merge (RFC 7386; null removes a member, a list is replaced), json (RFC 6902; a
list of operations), and strategic, the default, which is the same as merge for these
resources, because none of their lists is merged by a key.`,
		Example: `  routerctl patch ippool default-ipv4-ippool -p '{"spec": {"natOutgoing": true}}'
  routerctl patch node node1 -p 'spec: {bgp: {routeReflectorClusterID: 10.0.0.1}}'
  routerctl patch bgppeer tor1 --type json -p '[{"op": "remove", "path": "/spec/password"}]'`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return usagef("patch: give a kind, a name, and a patch with -p")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := oneKey(args[0], args[1], namespace)
			if err != nil {
				return err
			}
			if p.patch, err = yaml.YAMLToJSON([]byte(text)); err != nil || text == "" {
				return usagef("patch: -p %q is neither JSON nor YAML", text)
			}
			if p.kind != "strategic" && p.kind != "merge" && p.kind != "json" {
				return usagef("patch: --type %q: must be one of strategic, merge, json", p.kind)
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return a.patch(ctx, s, key, p) })
		},
	}
	f := c.Flags()
	f.StringVarP(&text, "patch", "p", "", "patch in JSON or YAML")
	f.StringVarP(&p.kind, "type", "t", "strategic", "type of the patch: strategic, merge or json")
	f.BoolVar(&p.dryRun, "dry-run", false, "check everything and print what would be done, but write nothing")
	f.BoolVar(&p.force, "force", false, "see apply --force")
	namespaceFlag(f, &namespace)
	a.confirmFlag(f)
	return c
}

// patch reads an object, patches it and replaces it, as long as nobody else has
// changed it in between.
func (a resourceCommands) patch(ctx context.Context, s store.Store, key store.Key, p patching) error {
	o, err := s.Get(ctx, key)
	if err != nil {
		return fmt.Errorf("patch %s: %w; see routerctl get %s", key, err, key.Kind.Plural())
	}
	o.Key = key
	raw, err := manifest.JSON(o)
	if err != nil {
		return err
	}
	next, err := p.apply(raw)
	if err != nil {
		return fmt.Errorf("patch %s: %w", key, err)
	}
	docs, err := manifest.Read("the patched object", bytes.NewReader(next))
	if err != nil {
		return fmt.Errorf("patch %s: %w", key, err)
	}
	if len(docs) != 1 || docs[0].Object.Key != key {
		return fmt.Errorf("patch %s: a patch must not change kind, name or namespace", key)
	}
	if err := a.check(ctx, s, docs, checks{force: p.force}); err != nil {
		return err
	}
	if p.force {
		forcePools(docs)
	}
	return writeAndFollow(ctx, s, a.stdout, patch, docs, writing{dryRun: p.dryRun})
}

func (p *patching) apply(raw json.RawMessage) ([]byte, error) {
	if p.kind != "json" {
		return jsonpatch.MergePatch(raw, p.patch)
	}
	ops, err := jsonpatch.DecodePatch(p.patch)
	if err != nil {
		return nil, fmt.Errorf("read the patch as a list of operations (RFC 6902): %w", err)
	}
	return ops.Apply(raw)
}
