package scenarios

import (
	"regexp"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/lab"
)

// plannedRules reads what a host's kernel has of policies and of the sets that they ask for: by "set ID" its
// members, and by "policy NAME" its rules.
func plannedRules(t *testing.T, l *lab.Lab, host string) map[string]string {
	t.Helper()
	out := map[string]string{}
	block, is := "", ""
	for line := range strings.Lines(output(t, l, host, "nft", "-s", "list", "table", "inet", "routerd")) {
		block += line
		switch word := strings.Fields(line); {
		case strings.HasPrefix(line, "\tset ") && setOfPolicy.MatchString(word[1]):
			is = "set " + setOfPolicy.FindStringSubmatch(word[1])[1]
		case strings.HasPrefix(line, "\t\tcomment ") && strings.Contains(line, " of GlobalNetworkPolicy("):
			_, name, _ := strings.Cut(strings.Trim(strings.TrimSpace(line), `"`), " of ")
			is = "policy " + name
		case line == "\t}\n":
			if is != "" {
				out[is] += block
			}
			block, is = "", ""
		}
	}
	return out
}

// setOfPolicy is the name of a set that a rule of a policy asks for, of one family.
var setOfPolicy = regexp.MustCompile(`^(s-[a-z0-9]+)-[46]n?$`) //nolint:gochecknoglobals // a constant

// whatChanged names what differs between two states of a host's rules.
func whatChanged(before, after map[string]string) []string {
	var out []string
	for k, was := range before {
		if will, stays := after[k]; !stays || was != will {
			out = append(out, k)
		}
	}
	for k := range after {
		if _, had := before[k]; !had {
			out = append(out, k)
		}
	}
	return inOrder(out)
}

// plannedNames names the policies and sets of policies that change on a host by a plan.
func plannedNames(text, host string) []string {
	var out []string
	for _, line := range linesOf(text, host) {
		f := strings.Fields(strings.TrimRight(line[2:], ";"))
		if len(f) < 2 || f[0] != "set" && f[0] != "policy" || f[0] == "set" && !strings.HasPrefix(f[1], "s-") {
			continue
		}
		out = append(out, f[0]+" "+strings.TrimRight(f[1], ";"))
	}
	return inOrder(out)
}
