package repo

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// wallClock lists the files that use a time as the wall clock has it, without its
// monotonic part, and what becomes of that when the clock jumps: docs/reliability.md
// says it for those where something does.
func wallClock() map[string]string {
	return map[string]string{
		"control/attach/add.go":          "when an attachment was made: shown, and on disk; one from the future is old",
		"control/attach/addresses.go":    "an attribute for people",
		"control/attach/allocate.go":     "as add.go",
		"control/bgp/engine/engine.go":   "no time: this side's address of a connection",
		"control/bgp/bmp/message.go":     "in a message: when something happened",
		"control/bgp/mrt/mrt.go":         "in a file: when a dump was made, and since when a path is there",
		"control/ipam/assign.go":         "a random choice",
		"control/ipam/assignaddr.go":     "a text",
		"control/ipam/block.go":          "in the datastore: from when on a block was held or an address cools down",
		"control/node/agent.go":          "a condition's last change: shown",
		"control/join/client.go":         "a text",
		"control/join/issuer.go":         "a text",
		"control/renewal/renewer.go":     "a text",
		"control/renewal/signer.go":      "a text",
		"control/join/token.go":          "when a token ends, for people: the issuer's record decides",
		"control/member/member.go":       "when an order ends: a host whose clock is ahead by more says so, and is ordered again",
		"control/member/service.go":      "a text",
		"control/nodestatus/status.go":   "a text",
		"control/operator/metrics.go":    "a metric",
		"control/presence/keeper.go":     "since when a name is held: shown",
		"control/probe/engine.go":        "tells requests of a peer apart from replayed ones",
		"control/probe/peer.go":          "as engine.go",
		"control/probe/status.go":        "when a peer answered: shown",
		"control/probe/tunnels.go":       "as status.go",
		"control/rpc/bgp.go":             "shown",
		"control/operator/bgpmetrics.go": "a metric",
		"store/history/history.go":       "when a change was made and what became of it: shown; names sort by it, but after those that are there",
		"store/embedded/peers.go":        "the name of a directory",
		"store/embedded/restore.go":      "the name of a directory",
		"store/incarnation.go":           "a text",
		"store/unmarshal.go":             "the form in which a time that was read is kept",
		"store/ops.go":                   "creationTimestamp",
		"store/kube/event.go":            "when an event was seen first and last: shown",
		"store/kube/network.go":          "a condition's last change: shown",
	}
}

// TestWallClock: whoever takes the wall clock's time has thought of a clock that
// jumps. Differences of [time.Time]s that come from time.Now in one process do not need it.
func TestWallClock(t *testing.T) {
	t.Parallel()
	known, used := wallClock(), map[string]bool{}
	for _, name := range sourceFiles(t) {
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || strings.HasSuffix(name, ".pb.go") {
			continue
		}
		if top, _, _ := strings.Cut(name, "/"); !slices.Contains([]string{"cmd", "cni", "control", "dataplane", "store"}, top) || strings.HasPrefix(name, "cmd/routerctl/") {
			continue
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, filepath.Join(root, name), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains([]string{"Unix", "UnixNano", "UnixMilli", "UnixMicro", "UTC", "Local"}, sel.Sel.Name) {
				return true
			}
			if id, ok := sel.X.(*ast.Ident); ok && id.Name != "time" && id.Obj == nil && sel.Sel.Name == "Unix" {
				return true // a package's own Unix
			}
			used[name] = true
			if known[name] == "" {
				t.Errorf("%s takes the wall clock's time: say in wallClock what becomes of it when the clock jumps", set.Position(call.Pos()))
			}
			return true
		})
	}
	for name := range known {
		if !used[name] {
			t.Errorf("%s does not use the wall clock any more: take it out of wallClock", name)
		}
	}
}
