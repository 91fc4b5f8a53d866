package main

import (
	_ "github.com/containernetworking/cni/libcni"
	_ "github.com/containernetworking/cni/pkg/skel"
	_ "github.com/containernetworking/cni/pkg/types/100"
	_ "github.com/coreos/go-systemd/v22/daemon"
	_ "github.com/gaissmai/bart"
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/mdlayher/netlink"
	_ "github.com/osrg/gobgp/v4/pkg/server"
	_ "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	_ "github.com/prometheus/client_golang/prometheus/promhttp"
	_ "github.com/rogpeppe/go-internal/testscript"
	_ "github.com/spf13/cobra"
	_ "github.com/spf13/viper"
	_ "github.com/vishvananda/netlink"
	_ "github.com/vishvananda/netns"
	_ "go.etcd.io/etcd/client/v3"
	_ "go.etcd.io/etcd/server/v3/embed"
	_ "go.uber.org/goleak"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sys/unix"
	_ "google.golang.org/grpc"
	_ "google.golang.org/protobuf/proto"
	_ "pgregory.net/rapid"
	_ "sigs.k8s.io/yaml"
)

func main() {}
