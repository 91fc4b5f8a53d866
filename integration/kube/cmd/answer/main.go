// Command answer is what runs in a pod that many requests are sent to: it answers each
// datagram with the host's name, and HTTP with 200 for who asks whether it is ready.
//
//	answer [-udp PORT] [-http PORT] [-sockets N]
//
// A datagram waits in a socket's buffer until the program has a processor. The buffer that the
// kernel gives an unprivileged one holds some 270, a second of 270 requests a second, so there
// are many sockets, among which the kernel shares what comes by its source (SO_REUSEPORT).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	udp := flag.Int("udp", 8081, "port of the datagrams")
	probe := flag.Int("http", 8080, "port of HTTP")
	sockets := flag.Int("sockets", 16, "how many sockets datagrams come to")
	flag.Parse()
	if err := run(*udp, *probe, *sockets); err != nil {
		fmt.Fprintln(os.Stderr, "answer:", err)
		os.Exit(1)
	}
}

func run(udp, probe, sockets int) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	listen := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var set error
		err := c.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(err, set)
	}}
	ended := make(chan error, 1)
	for range sockets {
		conn, err := listen.ListenPacket(context.Background(), "udp", fmt.Sprintf(":%d", udp))
		if err != nil {
			return err
		}
		go func() { ended <- answer(conn.(*net.UDPConn), []byte(name)) }()
	}
	server := http.Server{
		Addr: fmt.Sprintf(":%d", probe), ReadHeaderTimeout: 10 * time.Second,
		Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}),
	}
	go func() { ended <- server.ListenAndServe() }()
	return <-ended
}

func answer(conn *net.UDPConn, name []byte) error {
	buf := make([]byte, 100)
	for {
		_, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return err
		}
		if _, err := conn.WriteToUDPAddrPort(name, from); err != nil && !errors.Is(err, syscall.EPERM) && !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
	}
}
