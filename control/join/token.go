// Package join takes a new host into a cluster whose datastore is one host's
// embedded etcd. That host gives out tokens; with one, a new host proves that it
// was invited, is sure whom it talks to, and gets a client certificate for a key
// that never leaves it. [Issuer] is the one end, [Ask] the other, [Token] what an
// operator carries between them.
package join

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Token is a join token. Whoever has it may take one host into the cluster, until it
// expires.
type Token struct {
	// ID finds the token in the datastore. It is no secret.
	ID string
	// Secret is 32 random bytes. The datastore has only their hash.
	Secret []byte
	// CA is the SHA-256 hash of the authority's certificate (DER), by which the new
	// host knows the server before it sends it anything.
	CA [sha256.Size]byte
	// Expires is when the issuer takes it no more, in whole seconds. It is for people:
	// the issuer has its own record.
	Expires time.Time
	// Address is where the issuer listens, HOST:PORT.
	Address string
}

const (
	// tokenPrefix distinguishes tokens from other texts, in files and in leaks, and their
	// versions apart.
	tokenPrefix = "rjt1."

	// What a token has, in this order; its address and a checksum follow.
	idSize, secretSize, expirySize = 8, 32, 8
	fixedSize                      = idSize + secretSize + sha256.Size + expirySize
)

// newToken draws a token, which has no address yet.
func newToken(ca [sha256.Size]byte, expires time.Time) (Token, error) {
	b := make([]byte, idSize+secretSize)
	if _, err := rand.Read(b); err != nil {
		return Token{}, fmt.Errorf("draw a token: %w", err)
	}
	return Token{ID: encodeID(b[:idSize]), Secret: b[idSize:], CA: ca, Expires: expires.Truncate(time.Second)}, nil
}

func encodeID(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

func validID(s string) bool {
	b, err := base64.RawURLEncoding.DecodeString(s)
	return err == nil && len(b) == idSize
}

// Encode returns the token as operators carry it. It is not called String, for a
// token is a secret that is not to be printed by chance.
func (t Token) Encode() (string, error) {
	id, err := base64.RawURLEncoding.DecodeString(t.ID)
	if err != nil || len(id) != idSize || len(t.Secret) != secretSize {
		return "", errors.New("the token has no id or no secret")
	}
	b := slices.Concat(id, t.Secret, t.CA[:])
	b = binary.BigEndian.AppendUint64(b, uint64(t.Expires.Unix())) //nolint:gosec // no token is of before 1970
	b = append(b, t.Address...)
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(b), nil
}

// ParseToken reads what [Token.Encode] wrote.
func ParseToken(s string) (Token, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return Token{}, errors.New("there is no token: `routerctl cluster token` on the host with the datastore makes one")
	}
	text, ok := strings.CutPrefix(s, tokenPrefix)
	if !ok {
		return Token{}, fmt.Errorf("this is no token: it begins with %q, as `routerctl cluster token` prints it", tokenPrefix)
	}
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(b) < fixedSize+crc32.Size {
		return Token{}, errToken
	}
	// What was lost on the way through people's hands is found by the checksum.
	b, sum := b[:len(b)-crc32.Size], b[len(b)-crc32.Size:]
	if crc32.ChecksumIEEE(b) != binary.BigEndian.Uint32(sum) {
		return Token{}, errToken
	}
	take := func(n int) (part []byte) { part, b = b[:n], b[n:]; return part }
	t := Token{ID: encodeID(take(idSize)), Secret: take(secretSize)}
	copy(t.CA[:], take(sha256.Size))
	t.Expires = time.Unix(int64(binary.BigEndian.Uint64(take(expirySize))), 0) //nolint:gosec // as Encode has it
	t.Address = string(b)
	if _, _, err := splitAddress(t.Address); err != nil {
		return Token{}, fmt.Errorf("the token's address: %w", err)
	}
	return t, nil
}

var errToken = errors.New("the token is cut short or mistyped: copy it whole, on one line")

// LogValue keeps the secret out of logs.
func (t Token) LogValue() slog.Value {
	return slog.GroupValue(slog.String("id", t.ID), slog.String("address", t.Address))
}

// String keeps the secret out of what is printed by chance.
func (t Token) String() string { return "token " + t.ID + " of " + t.Address }

// GoString keeps the secret out of %#v.
func (t Token) GoString() string { return t.String() }

// At returns the token with another way to the same issuer: a host, or HOST:PORT.
// An empty one changes nothing.
func (t Token) At(host string) (Token, error) {
	if host == "" {
		return t, nil
	}
	_, port, err := splitAddress(t.Address)
	if err != nil {
		return Token{}, err
	}
	if h, p, err := splitAddress(host); err == nil {
		host, port = h, p
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if !validHost(host) {
		return Token{}, fmt.Errorf("%q: want a host's name or address, or HOST:PORT", host)
	}
	t.Address = net.JoinHostPort(host, port)
	return t, nil
}

// validHost reports whether a host can stand in a URL, and on a terminal, as it is.
func validHost(host string) bool {
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Zone() == ""
	}
	return host != "" && strings.Trim(host, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._") == ""
}

func splitAddress(s string) (host, port string, err error) {
	host, port, err = net.SplitHostPort(s)
	if err != nil {
		return "", "", err
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || !validHost(host) || s != net.JoinHostPort(host, port) {
		return "", "", fmt.Errorf("%q: want HOST:PORT", s)
	}
	return host, port, nil
}
