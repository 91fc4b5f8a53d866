package lab

import (
	"context"

	"github.com/routerd/routerd/integration/lab/traffic"
)

// Place returns HOST or HOST/POD as traffic knows it.
func (l *Lab) Place(where string) (traffic.Place, error) {
	if err := l.checkWhere(where); err != nil {
		return traffic.Place{}, err
	}
	a, err := l.Addr(where)
	return traffic.Place{Name: where, Space: l.Space(where), Addr: a}, err
}

func (l *Lab) places(pair [2]string) (out [2]traffic.Place, err error) {
	for i, where := range pair {
		if out[i], err = l.Place(where); err != nil {
			return out, err
		}
	}
	return out, nil
}

// StartLoad starts numbered packets in both directions between each pair of
// HOST or HOST/POD. The caller stops them.
func (l *Lab) StartLoad(o traffic.LoadOptions, pairs ...[2]string) (*traffic.Load, error) {
	var places [][2]traffic.Place
	for _, p := range pairs {
		two, err := l.places(p)
		if err != nil {
			return nil, err
		}
		places = append(places, two)
	}
	return traffic.StartLoad(o, places...)
}

// StartStream connects two of HOST or HOST/POD by TCP. The caller stops the
// stream.
func (l *Lab) StartStream(ctx context.Context, o traffic.StreamOptions, from, to string) (*traffic.Stream, error) {
	two, err := l.places([2]string{from, to})
	if err != nil {
		return nil, err
	}
	return traffic.StartStream(ctx, o, two[0], two[1])
}

// Send sends n bytes by TCP from HOST or HOST/POD to another.
func (l *Lab) Send(ctx context.Context, from, to string, n int) (traffic.Transfer, error) {
	two, err := l.places([2]string{from, to})
	if err != nil {
		return traffic.Transfer{}, err
	}
	return traffic.Send(ctx, two[0], two[1], n)
}
