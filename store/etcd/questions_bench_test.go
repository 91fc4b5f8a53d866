package etcd_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// BenchmarkAskAll asks a thousand hosts at once what a plan asks: 2 KiB, answered by what a host says of so many routes that change,
// 80 bytes each. All are in this process, so what they need counts.
func BenchmarkAskAll(b *testing.B) {
	for _, routes := range []int{1, 100, 1000} {
		b.Run(fmt.Sprint("routes=", routes), func(b *testing.B) {
			server, err := embedded.Start(await.Context(b), embedded.Config{Dir: b.TempDir(), Socket: b.TempDir() + "/s"})
			if err != nil {
				b.Fatal(err)
			}
			defer server.Close()
			s, err := etcd.Open(b.Context(), etcd.Config{Endpoints: []string{server.Endpoint()}})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			ctx, cancel := context.WithCancel(b.Context())
			var answering sync.WaitGroup
			defer answering.Wait()
			defer cancel()
			var nodes []string
			answer := bytes.Repeat([]byte("r"), 80*routes)
			for i := range 1000 {
				node := fmt.Sprint("node", i)
				nodes = append(nodes, node)
				answering.Go(func() {
					s.Questions(ctx, node, func(context.Context, []byte) []byte { return answer })
				})
			}
			question := bytes.Repeat([]byte("q"), 2<<10)
			for b.Loop() {
				n := 0
				if err := s.AskAll(ctx, nodes, question, func(string, []byte) { n++ }); err != nil || n != len(nodes) {
					b.Fatal(n, err)
				}
			}
		})
	}
}
