package cluster

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"runtime"
	"slices"
	"strings"
)

// Image is a container image, made of programs of this machine.
type Image struct {
	Name       string        // with its tag: "docker.io/library/routerd:latest"
	Layers     [][]ImageFile // a file hides those of the same path in the layers before
	Entrypoint []string
	Cmd        []string
	Env        []string
}

// ImageFile is a file of an image: a copy of one of this machine, a text, or a symbolic
// link.
type ImageFile struct {
	Path   string // in the image, without a leading slash
	Source string
	Text   string
	Link   string
}

// WriteImages writes images as the archive that `docker save` writes and containerd
// imports: the layers, each once, the configurations and a manifest.
func WriteImages(w io.Writer, images []Image) error {
	out := tar.NewWriter(w)
	written := map[string]bool{}
	write := func(name string, body []byte) error {
		if written[name] {
			return nil
		}
		written[name] = true
		if err := out.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(body))}); err != nil {
			return err
		}
		_, err := out.Write(body)
		return err
	}
	sum := func(b []byte) string { h := sha256.Sum256(b); return hex.EncodeToString(h[:]) }
	var manifest []map[string]any
	for _, i := range images {
		var names, ids []string
		for _, files := range i.Layers {
			body, err := layer(files)
			if err != nil {
				return fmt.Errorf("image %s: %w", i.Name, err)
			}
			names, ids = append(names, sum(body)+"/layer.tar"), append(ids, "sha256:"+sum(body))
			if err := write(sum(body)+"/layer.tar", body); err != nil {
				return err
			}
		}
		config, err := json.Marshal(map[string]any{
			"architecture": runtime.GOARCH, "os": "linux",
			"config": map[string]any{"Entrypoint": i.Entrypoint, "Cmd": i.Cmd, "Env": i.Env},
			"rootfs": map[string]any{"type": "layers", "diff_ids": ids},
		})
		if err != nil {
			return err
		}
		if err := write(sum(config)+".json", config); err != nil {
			return err
		}
		manifest = append(manifest, map[string]any{"Config": sum(config) + ".json", "RepoTags": []string{i.Name}, "Layers": names})
	}
	body, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	return errors.Join(write("manifest.json", body), out.Close())
}

// layer returns the archive of files, with the directories that they are in.
func layer(files []ImageFile) ([]byte, error) {
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
	for _, f := range files {
		if err := directory(path.Dir(f.Path)); err != nil {
			return nil, err
		}
		if f.Link != "" {
			if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: f.Path, Linkname: f.Link, Mode: 0o777}); err != nil {
				return nil, err
			}
			continue
		}
		body := []byte(f.Text)
		if f.Source != "" {
			var err error
			if body, err = os.ReadFile(f.Source); err != nil {
				return nil, err
			}
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

// busyboxPrograms are those that the tests' image has.
var busyboxPrograms = []string{"cat", "sleep", "ip", "ping", "ping6", "httpd", "hostname", "ls", "echo", "true", "grep", "timeout", "date", "seq", "id", "nslookup", "test"}

// agnhostFiles returns the files of the tests' image: the program itself, and what its
// original has of Alpine's packages and the tests run, from this machine.
func agnhostFiles(ctx context.Context, agnhost, busybox string) ([]ImageFile, error) {
	files := []ImageFile{{Path: "agnhost-2", Source: agnhost}, {Path: "agnhost", Link: "agnhost-2"}, {Path: "bin/busybox", Source: busybox}}
	for _, p := range busyboxPrograms {
		files = append(files, ImageFile{Path: "bin/" + p, Link: "busybox"})
	}
	// Not busybox's sh, which takes its own nc before the one in PATH; its wget of Debian 12
	// ends with a segmentation fault where it is to have a timeout.
	files = append(files, ImageFile{Path: "bin/sh", Link: "bash"})
	for name, program := range map[string]string{"bash": "bash", "curl": "curl", "nc": "nc.openbsd", "wget": "wget"} {
		linked, err := linkedFiles(ctx, name, program)
		if err != nil {
			return nil, err
		}
		files = replaced(files, linked)
	}
	return files, nil
}

// linkedFiles returns a program of this machine as a file of an image's /bin, with the
// libraries that it is linked to.
func linkedFiles(ctx context.Context, name, program string) ([]ImageFile, error) {
	source, err := exec.LookPath(program)
	if err != nil {
		return nil, err
	}
	out, err := output(exec.CommandContext(ctx, "ldd", source))
	if err != nil {
		return nil, err
	}
	files := []ImageFile{{Path: "bin/" + name, Source: source}}
	for field := range strings.FieldsSeq(out) {
		if path, absolute := strings.CutPrefix(field, "/"); absolute {
			files = append(files, ImageFile{Path: path, Source: field})
		}
	}
	return files, nil
}

// replaced returns files with others added, or in the place of those of the same path.
func replaced(files, by []ImageFile) []ImageFile {
	out := slices.DeleteFunc(slices.Clone(files), func(f ImageFile) bool {
		return slices.ContainsFunc(by, func(other ImageFile) bool { return other.Path == f.Path })
	})
	return append(out, by...)
}
