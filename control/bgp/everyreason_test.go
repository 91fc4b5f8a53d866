package bgp

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// source is this package's functions and methods by name.
type source map[string][]*ast.FuncDecl

// parsePackage reads this package's files: of the package, and of its tests.
func parsePackage(t testing.TB) (pkg, tests source) {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	pkg, tests = source{}, source{}
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		into := pkg
		if strings.HasSuffix(name, "_test.go") {
			into = tests
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				into[fn.Name.Name] = append(into[fn.Name.Name], fn)
			}
		}
	}
	return pkg, tests
}

// reasonFields is where a reason is kept until the status shows it.
func reasonFields() []string {
	return []string{"Problem", "Waiting", "last", "ended", "objection", "problem", "wrong", "wrongPeer", "wrongNote", "linkNote"}
}

// makers returns the functions in which reasons are made: those that set one of
// the fields, those that are called elsewhere for their text, and what text they
// ask for in turn.
func (s source) makers() []string {
	// session.info is the status's own; the others' text comes in errors.
	queue := []string{"info", "ReadSecret", "password", "passwordOf", "Error"}
	for name, decls := range s {
		if slices.ContainsFunc(decls, setsReason) {
			queue = append(queue, name)
		}
	}
	var out []string
	for len(queue) > 0 {
		name := queue[0]
		queue = queue[1:]
		if slices.Contains(out, name) {
			continue
		}
		out = append(out, name)
		for _, fn := range s[name] {
			ast.Inspect(fn, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok && slices.ContainsFunc(s[called(call)], givesText) {
					queue = append(queue, called(call))
				}
				return true
			})
		}
	}
	slices.Sort(out)
	return out
}

func setsReason(fn *ast.FuncDecl) bool {
	set := false
	is := func(e ast.Expr) bool {
		if sel, ok := e.(*ast.SelectorExpr); ok {
			return slices.Contains(reasonFields(), sel.Sel.Name)
		}
		id, ok := e.(*ast.Ident)
		return ok && slices.Contains(reasonFields(), id.Name)
	}
	ast.Inspect(fn, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			set = set || slices.ContainsFunc(n.Lhs, is)
		case *ast.KeyValueExpr:
			set = set || is(n.Key)
		}
		return true
	})
	return set
}

// called names the function or method of a call.
func called(c *ast.CallExpr) string {
	switch f := c.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		return f.Sel.Name
	}
	return ""
}

// givesText reports whether a function returns a string.
func givesText(fn *ast.FuncDecl) bool {
	return fn.Type.Results != nil && slices.ContainsFunc(fn.Type.Results.List, func(f *ast.Field) bool {
		id, ok := f.Type.(*ast.Ident)
		return ok && id.Name == "string"
	})
}

// texts returns the strings of several words in functions, but for what is only
// searched for or logged.
func (s source) texts(names []string) []string {
	const letters = "abcdefghijklmnopqrstuvwxyz"
	var out []string
	for _, name := range names {
		for _, fn := range s[name] {
			ast.Inspect(fn, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.CallExpr:
					sel, ok := n.Fun.(*ast.SelectorExpr)
					if !ok {
						return true
					}
					if x, ok := sel.X.(*ast.Ident); ok && (x.Name == "strings" || sel.Sel.Name == "Sscanf") {
						return false
					}
					x, ok := sel.X.(*ast.SelectorExpr)
					return !ok || x.Sel.Name != "log"
				case *ast.BasicLit:
					if text, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING && strings.ContainsAny(text, letters) && strings.Contains(text, " ") {
						out = append(out, text)
					}
				}
				return true
			})
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// longest returns the longest part of a text that is in whatever is made of it.
func longest(text string) string {
	parts := regexp.MustCompile(`%(\[\d\])?[a-z]`).Split(text, -1)
	return slices.MaxFunc(parts, func(a, b string) int { return len(a) - len(b) })
}

// wants returns what a test compares with: its own strings, or the golden files.
func (s source) wants(t testing.TB, test string) string {
	t.Helper()
	var out strings.Builder
	for _, fn := range s[test] {
		ast.Inspect(fn, func(n ast.Node) bool {
			if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
				text, err := strconv.Unquote(l.Value)
				if err != nil {
					t.Fatal(err)
				}
				out.WriteString(text + "\n")
			}
			return true
		})
	}
	if test != "TestDesired" {
		return out.String()
	}
	files, err := filepath.Glob("testdata/*.golden")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		out.Write(b)
	}
	return out.String()
}

// notOfSessions are functions that [source.makers] takes for makers of reasons,
// for they have the names of others.
func notOfSessions() []string {
	return []string{
		"String",                                  // a path's
		"reason", "judgeExport", "told", "silent", // what becomes of a route
		"run",        // of the watch for secrets
		"Reflectors", // how far the choice of reflectors is
		"useKey",     // why nodes sign nothing
	}
}

// shownBy is every reason for which a session is not up, by the test that shows
// it: against BIRD, FRR or raw bytes where it is the peer's doing; by what is in
// the store, on the link or on this host where it is not.
func shownBy() map[string][]string {
	return map[string][]string{
		// The peer, or the way to it.
		"TestReasons": {
			"connection refused by %s: nothing listens there, or it is filtered",
			"no route to %s", "this host does not have the address %s to connect from", "connect: ",
			"passive: waiting for the peer to connect",
		},
		"TestFiltered":         {"no answer from %s: it is down, or filtered on the way"},
		"TestClosedBeforeOpen": {"%s closed the connection before it opened a session: is this node's address known to it as a peer?"},
		"TestBIRDWrongAS":      {"wrong AS: %s has AS %d, but AS %d is configured for it"},
		"TestInfo": {
			"wrong AS: %s does not have AS %d, which is configured for it (%s)", " (%q)",
			"send hold timer expired: the peer read nothing (RFC 9687)", "the peer restarted: it opened a new connection",
		},
		"TestBIRDExpectsAnotherAS": {"wrong AS: %s expects another one of this node than %d (%s)"},
		"TestNotifications":        {"notification received: ", "code %d, subcode %d"},
		"TestEnds":                 {"the last session ended: ", "the connection was lost", "notification sent: "},
		"TestBIRDHoldTimer":        {"hold timer expired: nothing was received from the peer"},
		"TestDoesNotComeBack":      {"; the peer's routes are kept while it restarts", "the peer did not come back within its restart time"},
		"TestPrefixLimit":          {"the peer announced more than %d prefixes: have it announce fewer, or raise %s's annotation %s; tried again after %s", "the BGPPeer"},
		"TestMeshLimit":            {"the default BGPConfiguration"},
		"TestTTLSecurityOfOneSide": {"TTL security suspected: %d segments came from further away than %d hops: does the peer have TTL security too?"},
		"TestMD5OfOneSide": {
			"MD5 suspected: %d segments came signed with another password",
			"MD5 suspected: %d segments came with a signature: does the peer have a password that is missing here?",
			"MD5 suspected: %d segments came without a signature: does the peer have the password?",
		},
		"TestDrops": {
			"TCP-AO suspected: %d segments came signed with another secret or algorithm for a key's id",
			"TCP-AO suspected: %d segments came signed with keys: does the peer have some that annotation %s lacks here?",
			"TCP-AO suspected: %d segments came signed with, or asked for, a key that is not among %s",
			"TCP-AO suspected: %d segments came without a signature: does the peer have the keys?",
		},
		"TestPasswordOnLink": {"connection refused by %s: nothing listens there, or it is filtered (a routerd node listens for peers on links if it has such a BGPPeer itself and bindMode is not NodeIP)"},
		"TestMeaning": {
			"message header error", "connection not synchronized", "bad message length", "bad message type", "OPEN message error", "unsupported version number",
			"bad peer AS", "bad BGP identifier", "unsupported optional parameter", "unacceptable hold time", "unsupported capability", "UPDATE message error",
			"malformed attribute list", "unrecognised well-known attribute", "missing well-known attribute", "attribute flags error", "attribute length error",
			"invalid ORIGIN", "invalid NEXT_HOP", "optional attribute error", "invalid network field", "malformed AS_PATH", "hold timer expired",
			"state machine error", "unexpected message in OpenSent", "unexpected message in OpenConfirm", "unexpected message in Established",
			"maximum number of prefixes reached", "administrative shutdown", "peer de-configured", "administrative reset", "connection rejected",
			"other configuration change", "connection collision resolution", "out of resources", "hard reset", "BFD down", "ROUTE-REFRESH message error",
			"invalid message length", "%s, subcode %d",
		},

		// This host.
		"TestPortTaken": {
			"port %d on %s is taken by %s: stop it, or set listenPort in the BGPConfiguration",
			"waiting for the peer to connect, but ",
		},
		"TestListenErrors": {
			"another program", "listen on %s: %v", "port %d on %s may not be opened: run as root or with CAP_NET_BIND_SERVICE",
			"this host does not have the address %s to listen on",
		},
		"TestReadSecret": {
			"secret %s is missing: put it in %s", "secret %s: %s holds %d bytes, and the kernel takes %d at most",
			"secret %s: %s is empty", "secret %s: %w", "secret %s: want a name and a key without slashes",
		},
		"TestSecretObjects": {
			"%s cannot be read, so its last known content is in use: %v", "it has ", "it is empty", "secret %s is missing: %s lacks the key %s, %s: kubectl -n %s edit secret %s",
			"secret %s is missing: make it: kubectl -n %s create secret generic %s --from-file=%s=FILE", "secret %s: the API has not said yet what is in %s",
			"the Secret %s of the namespace %s",
		},
		"TestKeysFailClosed": {"annotation %s: %s", "annotation %s: %w", "key %s: %w", "left out: "},
		"TestKeysBesideRange": {
			"annotation %s: %s is inside %s, and the kernel can sign for an address in one way only: narrow the range, or let neither have TCP-AO",
		},
		"TestMissingSecret": {"; the session is not run without it"},
		"TestOnLinks": {
			"device %s has %d neighbours, %s: give the right one in spec.peerIP",
			"no neighbour has been heard on %s yet: does the other side send router advertisements, or have this node as its neighbour there?",
			"device %s has no IPv6 link-local address; net.ipv6.conf.%s.disable_ipv6 and addr_gen_mode decide that",
			"device %s is down or without carrier", "there is no device %s on this host",
		},
		"TestSameNeighbourTwice": {
			"neighbour %s of device %s has the address of the one of BGPPeer %s, and one has a spec.password or keys for TCP-AO: give the two neighbours different addresses, or remove the passwords and keys",
		},

		"TestRefusesInjection": {
			"the default route: it is accepted only if bgp.inject.allow lists exactly it", "outside bgp.inject.allow", "the address of node ",
			"inside the pool %s, whose addresses IPAM assigns: it is accepted only if bgp.inject.allow lists a part of the pool",
			"spec.peerIP %s: programs on this host may not inject routes (bgp.inject.maxRoutes is 0)",
		},
		"TestLocalPeer": {"; it may not be injected"},

		// What is configured.
		"TestDesired": {
			"spec.node and spec.nodeSelector exclude each other: keep one",
			"a duration from 1s to 16777215s (RFC 9494 section 3)",
			"a duration from 3s to 65535s (RFC 4271 section 4.2)",
			"a number of prefixes from 1 on",
			"annotation %s is %q: want %s",
			"BGPConfiguration default: ", // and what is wrong with its annotation
			"BGPConfiguration default: nodeMeshMaxRestartTime",
			"BGPConfiguration default: nodeMeshPassword",
			"node %s has the address of this node, %s: give one of the two another spec.bgp.%s",
			"spec.filters: there is no BGPFilter %s; the session is not run without it",
			"annotation %s: this node is a route reflector, and what it would pass on from an iBGP session over link-local addresses has next hops that mean something on one link only; give spec.peerIP instead",
			"BGPPeer %s already has a session on the link of %s: give both their spec.peerIP",
			"the address is also that of node %s: give one of the two another spec.bgp.%s",
			"spec.asNumber is missing: give the AS of the peer",
			"spec.keepaliveTime is %s: want less than the hold time, %s",
			"spec.localASNumber %d: the BGPPeer applies to this node and to node %s and selects both as peers, so each would use this AS and expect another of its peer: select each node on one side only",
			"spec.localASNumber is 0, which is reserved: leave it out for the node's own",
			"spec.numAllowedLocalASNumbers is %d: want 0 to 255",
			"spec.peerIP %s: not the address of a host",
			"%s: this node has no address of its family as source; give it a spec.bgp.%s",
			"annotation %s %s", "spec.peerIP %s", // and what is wrong with it
			"annotation %s: BGPPeer %s listens for %s already: keep one of the two",
			"spec.password: %s is inside %s and has no password, but the kernel would require this one of it: give it one too, or narrow the range",
			"spec.peerIP %s: want a plain address that is not link-local, which does not tell the link; annotation %s names the link's device",
			"spec.reachableBy %q: want the address of a gateway of the peer's family",
			"spec.reachableBy %q: the peer is on this host: leave it out",
			"spec.sourceAddress %q: want UseNodeIP or None",
			"spec.ttlSecurity is 0: want the number of hops to the peer, from 1 to 255; leave it out to turn the check off",
			"this node's spec.bgp.routeReflectorClusterID is %q: want an identifier in the form of an IPv4 address, such as 244.0.0.1",
			"%s is %s: want 1s to %s (RFC 4724 section 3)",
			".secretKeyRef needs both name and key; the session is not run without a password",
			"spec.localWorkloadSelector is not supported by this version; no session with a workload is run",
			"spec.peerIP %q: want an address or address:port, such as 10.1.0.1 or 10.1.0.1:1790",
			"spec.nodeSelector: %v",
			"spec.peerSelector: %v",
		},
	}
}

// TestEveryReason: each reason that the code can give is in the table, and the
// test that is to show it exists and asks for it. The two of one word are left
// out: Established, and connecting, which TestFiltered sees.
func TestEveryReason(t *testing.T) {
	t.Parallel()
	pkg, tests := parsePackage(t)
	makers := slices.DeleteFunc(pkg.makers(), func(name string) bool { return slices.Contains(notOfSessions(), name) })
	given := pkg.texts(makers)
	var listed []string
	for test, reasons := range shownBy() {
		listed = append(listed, reasons...)
		if _, ok := tests[test]; !ok {
			t.Errorf("there is no %s", test)
			continue
		}
		wants := tests.wants(t, test)
		for _, reason := range reasons {
			if !strings.Contains(wants, longest(reason)) {
				t.Errorf("%s does not ask for %q", test, reason)
			}
		}
	}
	slices.Sort(listed)
	if diff := cmp.Diff(listed, given); diff != "" {
		t.Errorf("reasons (-table +code):\n%s", diff)
	}
}
