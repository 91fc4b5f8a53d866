package bgp

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// readMessage reads a message from a speaker under test.
func readMessage(r io.Reader) (*packet.BGPMessage, error) {
	head := make([]byte, packet.BGP_HEADER_LENGTH)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint16(head[16:])
	if n < packet.BGP_HEADER_LENGTH || n > packet.BGP_MAX_MESSAGE_LENGTH {
		return nil, fmt.Errorf("message of %d bytes", n)
	}
	msg := append(head, make([]byte, int(n)-len(head))...)
	if _, err := io.ReadFull(r, msg[len(head):]); err != nil {
		return nil, err
	}
	return packet.ParseBGPMessage(msg)
}

// sendOpen opens a session by hand, without graceful restart.
func sendOpen(w io.Writer, c *Config, p Peer) error {
	as := uint16(packet.AS_TRANS)
	own := p.localASN(c.ASN)
	if own <= 1<<16-1 {
		as = uint16(own)
	}
	caps := []packet.ParameterCapabilityInterface{packet.NewCapFourOctetASNumber(own)}
	for _, f := range p.carries() {
		caps = append(caps, packet.NewCapMultiProtocol(packet.NewFamily(f.AFI(), packet.SAFI_UNICAST)))
	}
	m, err := packet.NewBGPOpenMessage(as, uint16(p.HoldTime/time.Second), c.RouterID, []packet.OptionParameterInterface{
		packet.NewOptionParameterCapability(caps),
	})
	if err != nil {
		return err
	}
	b, err := m.Serialize()
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}
