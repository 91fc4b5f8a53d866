package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
)

// labelling is one change of one label.
type labelling struct {
	of         string // the kind and the name, as they were typed: calicoctl says what it did in these words
	key, value string
	remove     bool
	overwrite  bool
	force      bool
}

func (a resourceCommands) labelCommand() *cobra.Command {
	var l labelling
	var namespace string
	c := &cobra.Command{
		Use:   "label KIND NAME KEY=VALUE | label KIND NAME KEY --remove",
		Short: "Set, change or remove a label of a resource",
		Long: `Set, change or remove one label of a resource. --overwrite is required to change the
value of an existing label. KEY- also removes a label, as in kubectl.`,
		Example: `  routerctl label node node1 rack=r1
  routerctl label node node1 rack=r2 --overwrite
  routerctl label node node1 rack --remove`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 3 {
				return usagef("label: give a kind, a name, and KEY=VALUE or KEY --remove")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := oneKey(args[0], args[1], namespace)
			if err != nil {
				return err
			}
			l.of = args[0] + " " + args[1]
			if err := l.parse(args[2]); err != nil {
				return err
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return a.label(ctx, s, key, l) })
		},
	}
	f := c.Flags()
	f.BoolVar(&l.remove, "remove", false, "remove the label")
	f.BoolVar(&l.overwrite, "overwrite", false, "change a label that has another value")
	f.BoolVar(&l.force, "force", false, "allow nodes without any BGP session and the end of this SSH session")
	namespaceFlag(f, &namespace)
	a.confirmFlag(f)
	return c
}

// parse reads KEY=VALUE, KEY or KEY-.
func (l *labelling) parse(arg string) error {
	key, value, set := strings.Cut(arg, "=")
	if !set && strings.HasSuffix(key, "-") {
		key, l.remove = strings.TrimSuffix(key, "-"), true
	}
	switch {
	case set && l.remove:
		return usagef("label: %q: --remove takes the label's name alone", arg)
	case !set && !l.remove:
		return usagef("label: %q: write KEY=VALUE, or KEY with --remove", arg)
	}
	if why := validation.IsQualifiedName(key); len(why) > 0 {
		return usagef("label: %q is not a valid label name: %s", key, strings.Join(why, "; "))
	}
	if why := validation.IsValidLabelValue(value); len(why) > 0 {
		return usagef("label: %q is not a valid label value: %s", value, strings.Join(why, "; "))
	}
	l.key, l.value = key, value
	return nil
}

// label changes a label, whatever else is changed of the object meanwhile.
func (a resourceCommands) label(ctx context.Context, s store.Store, key store.Key, l labelling) error {
	if why := unwritable(key); why != "" {
		return fmt.Errorf("label %s: %s", key, why)
	}
	did := ""
	_, err := store.Modify(ctx, s, key, func(cur store.Object) (any, error) {
		if cur.Value == nil {
			return nil, fmt.Errorf("%w; see routerctl get %s", store.ErrNotFound, key.Kind.Plural())
		}
		value := store.Clone(cur.Value)
		m := store.Meta(value)
		old, has := m.Labels[l.key]
		switch {
		case l.remove && !has:
			return nil, fmt.Errorf("there is no label %q", l.key)
		case l.remove:
			delete(m.Labels, l.key)
			did = "removed label " + l.key + " from"
		case has && old != l.value && !l.overwrite:
			return nil, fmt.Errorf("label %q has the value %q already; change it with --overwrite", l.key, old)
		default:
			if m.Labels == nil {
				m.Labels = map[string]string{}
			}
			m.Labels[l.key] = l.value
			did = "set label " + l.key + " on"
			if has {
				did = "updated label " + l.key + " on"
			}
		}
		if err := store.Validate(value); err != nil || l.force {
			return value, err
		}
		raw, err := store.Encode(key, value, cur.Raw)
		if err != nil {
			return nil, err
		}
		return value, a.checkChanges(ctx, []*apiv1.BGPChange{{Key: key.Path(), Value: raw}})
	})
	if err != nil {
		return fmt.Errorf("label %s: %w", key, err)
	}
	fmt.Fprintf(a.stdout, "Successfully %s %s\n", did, l.of)
	return nil
}
