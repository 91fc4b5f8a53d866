package kube

import (
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/routerd/routerd/store/embedded"
)

// otherEtcd is an etcd that is not routerd's.
type otherEtcd struct {
	process *exec.Cmd
	url     string
}

// startEtcd starts a program, which an API server waits for. It ends with this process.
func startEtcd(program, dir string) (*otherEtcd, error) {
	var urls [2]string
	for i := range urls {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		urls[i] = "http://127.0.0.1:" + strconv.Itoa(port)
	}
	e := &otherEtcd{url: urls[0], process: exec.Command(program, "--data-dir="+filepath.Join(dir, "etcd"), "--logger=zap", "--log-outputs="+filepath.Join(dir, "etcd.log"),
		"--listen-client-urls="+urls[0], "--advertise-client-urls="+urls[0], "--listen-peer-urls="+urls[1],
		"--initial-advertise-peer-urls="+urls[1], "--initial-cluster=default="+urls[1])}
	e.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return e, e.process.Start()
}

func (e *otherEtcd) close() {
	_ = e.process.Process.Kill() // it may have ended
	_ = e.process.Wait()
}

// etcdFlags returns those of an API server about its etcd.
func (s *Server) etcdFlags() []string {
	if s.other != nil {
		return []string{"--etcd-servers=" + s.other.url}
	}
	ca, cert, key := embedded.ClientFiles(s.etcd.PKIDir())
	return []string{
		"--etcd-servers=https://" + s.etcd.Listen().String(),
		"--etcd-cafile=" + ca, "--etcd-certfile=" + cert, "--etcd-keyfile=" + key,
	}
}
