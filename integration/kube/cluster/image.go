package cluster

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
)

// Image is a container image of one layer, made of static programs of this machine.
type Image struct {
	Name       string // with its tag: "docker.io/library/routerd:latest"
	Files      []ImageFile
	Entrypoint []string
	Cmd        []string
	Env        []string
}

// ImageFile is a file of an image: a copy of one of this machine, or a symbolic link.
type ImageFile struct {
	Path   string // in the image, without a leading slash
	Source string
	Link   string
}

// Write writes the image as the archive that `docker save` writes and containerd
// imports: the layer, the configuration and a manifest.
func (i Image) Write(w io.Writer) error {
	layer, err := i.layer()
	if err != nil {
		return fmt.Errorf("image %s: %w", i.Name, err)
	}
	sum := func(b []byte) string { h := sha256.Sum256(b); return hex.EncodeToString(h[:]) }
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": i.Entrypoint, "Cmd": i.Cmd, "Env": i.Env},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + sum(layer)}},
	})
	if err != nil {
		return err
	}
	configName, layerName := sum(config)+".json", sum(layer)+"/layer.tar"
	manifest, err := json.Marshal([]map[string]any{{"Config": configName, "RepoTags": []string{i.Name}, "Layers": []string{layerName}}})
	if err != nil {
		return err
	}
	out := tar.NewWriter(w)
	for _, f := range []struct {
		name string
		body []byte
	}{{layerName, layer}, {configName, config}, {"manifest.json", manifest}} {
		if err := out.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.body))}); err != nil {
			return err
		}
		if _, err := out.Write(f.body); err != nil {
			return err
		}
	}
	return out.Close()
}

// layer returns the archive of the files, with the directories that they are in.
func (i Image) layer() ([]byte, error) {
	var b bytes.Buffer
	out := tar.NewWriter(&b)
	made := map[string]bool{".": true}
	var directory func(name string) error
	directory = func(name string) error {
		if made[name] {
			return nil
		}
		made[name] = true
		if err := directory(path.Dir(name)); err != nil {
			return err
		}
		return out.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755})
	}
	for _, f := range i.Files {
		if err := directory(path.Dir(f.Path)); err != nil {
			return nil, err
		}
		if f.Link != "" {
			if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: f.Path, Linkname: f.Link, Mode: 0o777}); err != nil {
				return nil, err
			}
			continue
		}
		body, err := os.ReadFile(f.Source)
		if err != nil {
			return nil, err
		}
		if err := out.WriteHeader(&tar.Header{Name: f.Path, Mode: 0o755, Size: int64(len(body))}); err != nil {
			return nil, err
		}
		if _, err := out.Write(body); err != nil {
			return nil, err
		}
	}
	err := out.Close()
	return b.Bytes(), err
}
