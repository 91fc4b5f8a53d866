package survey

import (
	"bytes"
	"compress/gzip"
	"testing"
	"testing/fstest"
)

func zipped(t *testing.T, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestFind(t *testing.T) {
	t.Parallel()
	modules := fstest.MapFS{
		"proc/modules":                               {Data: []byte("vxlan 147456 0 - Live 0x0\nnf_conntrack 1 2 nft_ct, Live 0x0\n")},
		"lib/modules/6.1.0-18-amd64/modules.dep":     {Data: []byte("kernel/net/ipv4/ipip.ko.xz: kernel/net/ipv4/tunnel4.ko.xz\nkernel/net/netfilter/nft-log.ko:\n")},
		"lib/modules/6.1.0-18-amd64/modules.builtin": {Data: []byte("kernel/drivers/net/veth.ko\n")},
		"sys/module/ipv6/parameters/disable":         {Data: []byte("0")},
	}
	config := func(file string, data []byte) fstest.MapFS {
		return fstest.MapFS{file: {Data: data}}
	}
	const text = "# CONFIG_NET_IPIP is not set\nCONFIG_VXLAN=m\nCONFIG_TCP_MD5SIG=y\n"
	for _, tt := range []struct {
		name    string
		root    fstest.MapFS
		feature Feature
		want    string
	}{
		{"loaded", modules, Feature{Module: "vxlan"}, InUse},
		{"by its file", modules, Feature{Module: "ipip"}, Loadable},
		{"with a dash in its file", modules, Feature{Module: "nft_log"}, Loadable},
		{"built in", modules, Feature{Module: "veth"}, BuiltIn},
		{"built in, with parameters", modules, Feature{Module: "ipv6"}, InUse},
		{"nowhere", modules, Feature{Module: "nft_masq", Config: "CONFIG_NFT_MASQ"}, NotFound},
		{"no module, no configuration", modules, Feature{Config: "CONFIG_NET_NS"}, NotKnown},
		{"nothing to read", fstest.MapFS{}, Feature{Module: "vxlan"}, NotKnown},
		{"configured as a module", config("proc/config.gz", zipped(t, text)), Feature{Module: "vxlan", Config: "CONFIG_VXLAN"}, Loadable},
		{"configured in", config("boot/config-6.1.0-18-amd64", []byte(text)), Feature{Config: "CONFIG_TCP_MD5SIG"}, BuiltIn},
		{"configured out", config("proc/config.gz", zipped(t, text)), Feature{Module: "ipip", Config: "CONFIG_NET_IPIP"}, NotFound},
		{"no gzip", config("proc/config.gz", []byte(text)), Feature{Config: "CONFIG_TCP_MD5SIG"}, NotKnown},
		{
			"configured as a module that is not installed",
			fstest.MapFS{"proc/config.gz": {Data: zipped(t, text)}, "lib/modules/6.1.0-18-amd64/modules.dep": {Data: []byte("kernel/a.ko:\n")}},
			Feature{Module: "vxlan", Config: "CONFIG_VXLAN"},
			NotFound,
		},
	} {
		s, err := ReadSystem(tt.root, "6.1.0-18-amd64", "")
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Find(tt.feature); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
	if _, err := ReadSystem(fstest.MapFS{}, "6.1", "etc/config"); err == nil {
		t.Error("a configuration that is named and is not there is no error")
	}
	s, err := ReadSystem(config("my/config", []byte(text)), "6.1", "my/config")
	if err != nil || s.Find(Feature{Config: "CONFIG_TCP_MD5SIG"}) != BuiltIn {
		t.Errorf("a configuration that is named is not read: %+v, %v", s, err)
	}
}

func TestAtLeast(t *testing.T) {
	t.Parallel()
	for release, want := range map[string]bool{"6.1.0-18-amd64": true, "5.10": true, "5.9.16": false, "4.19": false, "10.0": true, "5.10-rc1": true, "x": false, "": false} {
		if got := AtLeast(release, MinRelease); got != want {
			t.Errorf("%s: %v", release, got)
		}
	}
}
