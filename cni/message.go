package cni

import (
	"encoding/binary"
	"errors"
)

// The messages of control/api/v1/cni.proto as the plugin needs them, in the
// protobuf encoding (protobuf.dev/programming-guides/encoding). They are
// written by hand because initialising the generated code and gRPC takes three
// times as long as all that the plugin does; a test holds them to the
// generated code, field by field.

type attachment struct {
	Network     string
	ContainerID string
	Ifname      string
}

type workload struct {
	Orchestrator string
	Namespace    string
	Pod          string
}

type addRequest struct {
	Attachment        attachment
	Workload          workload
	Netns             string
	MTU               int32
	IPv4Pools         []string
	IPv6Pools         []string
	AssignIPv4        bool
	AssignIPv6        bool
	RequestedIPs      []string
	AllowIPForwarding bool
	Node              string
	NamespaceLabels   []string
	MAC               string
	Given             []string
}

type allocateRequest struct {
	Attachment      attachment
	Workload        workload
	Node            string
	IPv4Pools       []string
	IPv6Pools       []string
	AssignIPv4      bool
	AssignIPv6      bool
	RequestedIPs    []string
	NamespaceLabels []string
	Link            string
	Gateway         bool
}

type allocateResponse struct {
	Addresses []address
}

type addResponse struct {
	HostInterface string
	HostMAC       string
	ContainerMAC  string
	MTU           int32
	Addresses     []address
}

type address struct {
	CIDR    string
	Gateway string
	Block   string
}

type delRequest struct {
	Attachment    attachment
	Workload      workload
	Netns         string
	AddressesOnly bool
}

type checkRequest struct {
	Attachment    attachment
	Workload      workload
	Netns         string
	HostInterface string
	ContainerMAC  string
	Addresses     []string
	AddressesOnly bool
}

type gcRequest struct {
	Network string
	Valid   []attachment
}

type gcResponse struct {
	Removed  []attachment
	Left     []attachment
	Unlisted bool
}

// The wire types of the encoding.
const (
	wireVarint = 0
	wire64     = 1
	wireBytes  = 2
	wire32     = 5
)

// encoder appends fields. Those with the zero value are left out, as proto3
// has it.
type encoder []byte

func (e *encoder) varint(field int, v uint64) {
	if v == 0 {
		return
	}
	*e = binary.AppendUvarint(*e, uint64(field)<<3|wireVarint)
	*e = binary.AppendUvarint(*e, v)
}

func (e *encoder) bool(field int, v bool) {
	if v {
		e.varint(field, 1)
	}
}

func (e *encoder) string(field int, v string) {
	if v != "" {
		e.bytes(field, []byte(v))
	}
}

func (e *encoder) bytes(field int, v []byte) {
	*e = binary.AppendUvarint(*e, uint64(field)<<3|wireBytes)
	*e = binary.AppendUvarint(*e, uint64(len(v)))
	*e = append(*e, v...)
}

// strings appends a repeated field: empty elements count.
func (e *encoder) strings(field int, vs []string) {
	for _, v := range vs {
		e.bytes(field, []byte(v))
	}
}

func (a attachment) encode() []byte {
	var e encoder
	e.string(1, a.Network)
	e.string(2, a.ContainerID)
	e.string(3, a.Ifname)
	return e
}

func (w workload) encode() []byte {
	var e encoder
	e.string(1, w.Orchestrator)
	e.string(2, w.Namespace)
	e.string(3, w.Pod)
	return e
}

func (r addRequest) encode() []byte {
	var e encoder
	e.bytes(1, r.Attachment.encode())
	e.bytes(2, r.Workload.encode())
	e.string(3, r.Netns)
	e.varint(4, uint64(r.MTU))
	e.strings(5, r.IPv4Pools)
	e.strings(6, r.IPv6Pools)
	e.bool(7, r.AssignIPv4)
	e.bool(8, r.AssignIPv6)
	e.strings(9, r.RequestedIPs)
	e.bool(10, r.AllowIPForwarding)
	e.string(11, r.Node)
	e.strings(12, r.NamespaceLabels)
	e.string(13, r.MAC)
	e.strings(14, r.Given)
	return e
}

func (r allocateRequest) encode() []byte {
	var e encoder
	e.bytes(1, r.Attachment.encode())
	e.bytes(2, r.Workload.encode())
	e.string(3, r.Node)
	e.strings(4, r.IPv4Pools)
	e.strings(5, r.IPv6Pools)
	e.bool(6, r.AssignIPv4)
	e.bool(7, r.AssignIPv6)
	e.strings(8, r.RequestedIPs)
	e.strings(9, r.NamespaceLabels)
	e.string(10, r.Link)
	e.bool(11, r.Gateway)
	return e
}

func (r delRequest) encode() []byte {
	var e encoder
	e.bytes(1, r.Attachment.encode())
	e.bytes(2, r.Workload.encode())
	e.string(3, r.Netns)
	e.bool(4, r.AddressesOnly)
	return e
}

func (r checkRequest) encode() []byte {
	var e encoder
	e.bytes(1, r.Attachment.encode())
	e.bytes(2, r.Workload.encode())
	e.string(3, r.Netns)
	e.string(4, r.HostInterface)
	e.string(5, r.ContainerMAC)
	e.strings(6, r.Addresses)
	e.bool(7, r.AddressesOnly)
	return e
}

func (r gcRequest) encode() []byte {
	var e encoder
	e.string(1, r.Network)
	for _, v := range r.Valid {
		e.bytes(2, v.encode())
	}
	return e
}

var errMessage = errors.New("malformed protobuf message")

// fields calls fn for each field of a message. Of fields with a length, value
// is their content; of others, number is the value.
func fields(b []byte, fn func(field int, number uint64, value []byte) error) error {
	for len(b) > 0 {
		tag, n := binary.Uvarint(b)
		if n <= 0 {
			return errMessage
		}
		b = b[n:]
		var (
			number uint64
			value  []byte
		)
		switch tag & 7 {
		case wireVarint:
			if number, n = binary.Uvarint(b); n <= 0 {
				return errMessage
			}
		case wireBytes:
			size, m := binary.Uvarint(b)
			if m <= 0 || size > uint64(len(b)-m) {
				return errMessage
			}
			n = m + int(size)
			value = b[m:n]
		case wire32:
			n = 4
		case wire64:
			n = 8
		default:
			return errMessage
		}
		if n > len(b) {
			return errMessage
		}
		b = b[n:]
		if err := fn(int(tag>>3), number, value); err != nil {
			return err
		}
	}
	return nil
}

func (r *addResponse) decode(b []byte) error {
	return fields(b, func(field int, number uint64, value []byte) error {
		switch field {
		case 1:
			r.HostInterface = string(value)
		case 2:
			r.HostMAC = string(value)
		case 3:
			r.ContainerMAC = string(value)
		case 4:
			r.MTU = int32(number)
		case 5:
			var a address
			err := a.decode(value)
			r.Addresses = append(r.Addresses, a)
			return err
		}
		return nil
	})
}

func (r *allocateResponse) decode(b []byte) error {
	return fields(b, func(field int, _ uint64, value []byte) error {
		if field != 1 {
			return nil
		}
		var a address
		err := a.decode(value)
		r.Addresses = append(r.Addresses, a)
		return err
	})
}

// texts decodes a message whose fields 1, 2 and so on are strings.
func texts(b []byte, to ...*string) error {
	return fields(b, func(field int, _ uint64, value []byte) error {
		if 1 <= field && field <= len(to) {
			*to[field-1] = string(value)
		}
		return nil
	})
}

func (a *address) decode(b []byte) error {
	return texts(b, &a.CIDR, &a.Gateway, &a.Block)
}

func (a *attachment) decode(b []byte) error {
	return texts(b, &a.Network, &a.ContainerID, &a.Ifname)
}

func (r *gcResponse) decode(b []byte) error {
	return fields(b, func(field int, number uint64, value []byte) error {
		var a attachment
		var err error
		switch field {
		case 1:
			err = a.decode(value)
			r.Removed = append(r.Removed, a)
		case 2:
			err = a.decode(value)
			r.Left = append(r.Left, a)
		case 3:
			r.Unlisted = number != 0
		}
		return err
	})
}

// detailOf returns the message that is the first detail of a google.rpc.Status,
// each of which is a google.protobuf.Any; nil: it has none.
func detailOf(b []byte) (detail []byte, err error) {
	err = fields(b, func(field int, _ uint64, value []byte) error {
		if field != 3 || detail != nil {
			return nil
		}
		detail = []byte{} // which an empty message is too
		return fields(value, func(field int, _ uint64, value []byte) error {
			if field == 2 {
				detail = value
			}
			return nil
		})
	})
	return detail, err
}
