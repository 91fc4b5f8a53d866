package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// delegated is what another IPAM plugin gave.
type delegated struct {
	addresses []string
	dns       types.DNS
}

// delegateAdd has the configuration's IPAM plugin give addresses. Its routes
// and gateways do not count: a container's packets all go to the host.
func (c *call) delegateAdd(ctx context.Context) (delegated, error) {
	out, err := c.delegate(ctx, "ADD")
	if err != nil {
		return delegated{}, err
	}
	got, err := delegatedResult(c.CNIVersion, out)
	if err == nil && len(got.IPs) == 0 {
		err = errors.New("it gave no address")
	}
	if err != nil {
		_, undo := c.delegate(ctx, "DEL")
		return delegated{}, alsoFailed(c.delegateError(types.ErrDecodingFailure, err.Error(), ""), "undo: ", undo)
	}
	d := delegated{dns: got.DNS}
	for _, ip := range got.IPs {
		d.addresses = append(d.addresses, ip.Address.IP.String())
	}
	return d, nil
}

func delegatedResult(confVersion string, b []byte) (*current.Result, error) {
	r, err := version.NewResult(confVersion, b)
	if err != nil {
		return nil, fmt.Errorf("its result: %w", err)
	}
	return current.GetResult(r)
}

// delegate executes the configuration's IPAM plugin with the same environment
// and configuration (CNI specification 1.1, section 4), and returns what it
// prints. The library's package for that links net/http, which takes longer to
// initialise than all that this plugin does.
func (c *call) delegate(ctx context.Context, verb string) ([]byte, error) {
	return c.delegateWith(ctx, verb, c.in.StdinData)
}

// delegateWith is delegate with a configuration that differs.
func (c *call) delegateWith(ctx context.Context, verb string, conf []byte) ([]byte, error) {
	path, err := findPlugin(c.IPAM.Type, c.in.Path)
	if err != nil {
		return nil, c.delegateError(types.ErrInvalidNetworkConfig, err.Error(), "")
	}
	cmd := exec.CommandContext(ctx, path)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb) // the last of a name counts
	cmd.Stdin = bytes.NewReader(conf)
	var out, diagnosis bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &diagnosis
	err = cmd.Run()
	if err == nil {
		return out.Bytes(), nil
	}
	var said types.Error
	if json.Unmarshal(out.Bytes(), &said) == nil && said.Code != 0 {
		return nil, c.delegateError(said.Code, said.Msg, said.Details)
	}
	return nil, c.delegateError(types.ErrInternal, err.Error(), strings.TrimSpace(diagnosis.String()))
}

// sparing returns the configuration for GC with further valid attachments: as long
// as something is left of one, its address must not be another's.
func (c *call) sparing(left []attachment) ([]byte, error) {
	if len(left) == 0 {
		return c.in.StdinData, nil
	}
	var conf map[string]json.RawMessage // numbers stay as they are
	if err := json.Unmarshal(c.in.StdinData, &conf); err != nil {
		return nil, err
	}
	all := slices.Clone(c.ValidAttachments)
	for _, a := range left {
		all = append(all, types.GCAttachment{ContainerID: a.ContainerID, IfName: a.Ifname})
	}
	valid, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	conf["cni.dev/valid-attachments"] = valid
	// libcni gives the list by the name of the specification's first text too.
	if _, ok := conf["cni.dev/attachments"]; ok {
		conf["cni.dev/attachments"] = valid
	}
	return json.Marshal(conf)
}

// delegateError says whose error it is.
func (c *call) delegateError(code uint, message, details string) error {
	return types.NewError(code, fmt.Sprintf("IPAM plugin %s (ipam.type): %s", c.IPAM.Type, message), details)
}

// findPlugin finds a plugin in the directories of CNI_PATH.
func findPlugin(name, path string) (string, error) {
	for _, dir := range filepath.SplitList(path) {
		if dir == "" {
			continue
		}
		file := filepath.Join(dir, name)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return file, nil
		}
	}
	return "", fmt.Errorf("there is no such program in CNI_PATH %q", path)
}
