package store

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

func TestParseTCPAO(t *testing.T) {
	t.Parallel()
	for value, want := range map[string][]TCPAOKey{
		"tor/k id=1": {{"tor", "k", 1, 1, "hmac(sha1)"}},
		"tor/2026-12 id=2 algorithm=hmac(sha256),\n  tor/2026-06 algorithm=cmac(aes128) id=1\n": {
			{"tor", "2026-12", 2, 2, "hmac(sha256)"}, {"tor", "2026-06", 1, 1, "cmac(aes128)"},
		},
		"a/b send=0 receive=255": {{"a", "b", 0, 255, "hmac(sha1)"}},
	} {
		got, err := ParseTCPAO(value)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%q: %v (-want +got):\n%s", value, err, diff)
		}
	}
	for value, says := range map[string]string{
		"":                          "one to 4 keys with commas between them",
		"a/b id=1,":                 "one to 4 keys with commas between them",
		"id=1":                      `"id=1": must be the name and the key of a secret`,
		"a/../b id=1":               "name and the key of a secret",
		"a/.. id=1":                 "name and the key of a secret",
		"a/b":                       "key a/b: give id=NUMBER",
		"a/b send=1":                "send=NUMBER and receive=NUMBER",
		"a/b id=1 send=2 receive=2": "key a/b: give id=NUMBER",
		"a/b id=256":                `"id=256": an id must be a number from 0 to 255`,
		"a/b id=-1":                 "from 0 to 255",
		"a/b id=1 id=2":             "id is there twice",
		"a/b id=1 algorithm=md5":    "must be one of hmac(sha1), cmac(aes128), hmac(sha256)",
		"a/b id=1 secret=x":         `"secret=x": must be one to 4 keys`,
		"a/b id=1, c/d id=1":        "a/b and c/d have the same id",
		"a/b send=1 receive=2, c/d send=3 receive=2":   "have the same id",
		"a/1 id=1,a/2 id=2,a/3 id=3,a/4 id=4,a/5 id=5": "there are 5 keys: must be 4 at most",
	} {
		if _, err := ParseTCPAO(value); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", value, err, says)
		}
	}
}

// TestTCPAOAndPassword: a BGPPeer is signed in one way.
func TestTCPAOAndPassword(t *testing.T) {
	t.Parallel()
	_, err := TCPAOOf(map[string]string{AnnotationTCPAO: "a/b id=1"}, v3.BGPPeerSpec{Password: &v3.BGPPassword{}})
	if err == nil || !strings.Contains(err.Error(), "spec.password") || !strings.Contains(err.Error(), "together with the annotation routerd.io/tcpAO") {
		t.Errorf("both: %v", err)
	}
	if _, err := TCPAOOf(map[string]string{AnnotationTCPAO: "a/b send=1 receive=2"}, v3.BGPPeerSpec{PeerSelector: "all()"}); err == nil || !strings.Contains(err.Error(), "key a/b: send and receive cannot differ with spec.peerSelector") {
		t.Errorf("between nodes: %v", err)
	}
	if keys, err := TCPAOOf(nil, v3.BGPPeerSpec{Password: &v3.BGPPassword{}}); len(keys) != 0 || err != nil {
		t.Errorf("a password alone: %v, %v", keys, err)
	}
	if _, err := TCPAOOf(map[string]string{AnnotationTCPAO: "x"}, v3.BGPPeerSpec{}); err == nil || !strings.Contains(err.Error(), "metadata.annotations[routerd.io/tcpAO]") {
		t.Errorf("a wrong one: %v", err)
	}
}
