package attach

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func eventName(e event) string {
	return [events]string{
		"none", "begun", "asked", "reserved", "completed", "stored", "adopted", "patching", "flushing", "fenced", "regained", "released", "wireGone", "disowned", "restarted",
	}[e]
}

// TestTransitions walks every state and event. A dot says that the state stays.
func TestTransitions(t *testing.T) {
	t.Parallel()
	const stays = unrecorded
	const local, pending, done, lost = attachedLocal, attachedPending, attachedStored, attachedFenced
	const relLocal, relPatched, relDisowned = releasingLocal, releasingPatched, releasingDisowned
	const detLocal, detPatched, detDisowned = detachedLocal, detachedPatched, detachedDisowned
	want := [states][events]state{
		//                   none   begun   asked    reserved     completed stored adopted patching flushing fenced regained released  wireGone       disowned     restarted
		unrecorded:        {stays, adding, stays, stays, stays, stays, done, stays, stays, stays, stays, releasing, stays, stays, stays},
		adding:            {stays, stays, stays, addingLocal, pending, done, stays, stays, stays, stays, stays, releasing, detached, stays, releasing},
		addingLocal:       {stays, adding, adding, stays, local, done, stays, stays, stays, stays, stays, relLocal, detLocal, stays, stays},
		attachedLocal:     {stays, stays, pending, stays, stays, done, stays, attachedPatched, pending, lost, stays, relLocal, stays, stays, stays},
		attachedPatched:   {stays, stays, pending, stays, stays, done, stays, stays, pending, lost, stays, relPatched, stays, stays, stays},
		attachedPending:   {stays, stays, stays, stays, stays, done, stays, stays, stays, lost, stays, releasing, stays, stays, stays},
		attachedStored:    {stays, stays, stays, stays, pending, stays, stays, stays, stays, lost, stays, releasing, stays, stays, stays},
		attachedFenced:    {stays, stays, stays, stays, pending, done, stays, stays, stays, stays, pending, releasing, stays, stays, stays},
		releasing:         {stays, adding, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, detached, relDisowned, stays},
		releasingLocal:    {stays, adding, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, detLocal, relDisowned, stays},
		releasingPatched:  {stays, adding, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, detPatched, relDisowned, stays},
		releasingDisowned: {stays, adding, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, detDisowned, stays, stays},
		detached:          {stays, adding, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, detDisowned, stays},
		detachedLocal:     {stays, adding, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, detDisowned, stays},
		detachedPatched:   {stays, adding, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, detDisowned, stays},
		detachedDisowned:  {stays, adding, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays, stays},
	}
	for s := range states {
		for e := range events {
			to := want[s][e]
			if to == stays {
				to = s
			}
			if got := s.after(e); got != to {
				t.Errorf("%s after %s: %s, want %s", s, eventName(e), got, to)
			}
		}
	}
}

// What holds of every transition, whatever the table says.
func TestTransitionsKeepPromises(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, tr := range transitions() {
		for _, from := range tr.from {
			name := fmt.Sprintf("%s after %s: %s", from, eventName(tr.on), tr.to)
			if key := fmt.Sprint(from, tr.on); seen[key] {
				t.Errorf("%s: there are two", name)
			} else {
				seen[key] = true
			}
			switch {
			case from == tr.to:
				t.Errorf("%s: it goes nowhere", name)
			case from.leaving() && !tr.to.leaving() && tr.on != begun:
				t.Errorf("%s: what was released comes back", name)
			case from.detached() && !tr.to.detached() && tr.on != begun:
				t.Errorf("%s: the wire comes back", name)
			case tr.to.withoutStore() && !from.withoutStore() && tr.on != reserved && tr.on != disowned:
				t.Errorf("%s: what the datastore may know of is released without it", name)
			case from.attached() && !tr.to.attached() && tr.on != released:
				t.Errorf("%s: a workload that runs is taken for one that does not", name)
			case tr.to == attachedStored && tr.on != stored && tr.on != adopted:
				t.Errorf("%s: nobody wrote it", name)
			}
		}
	}
}

// The disk has of each state what a start of the daemon needs to know, and no
// more: it may know less than the state says, never more.
func TestStatesOnDisk(t *testing.T) {
	t.Parallel()
	for s, want := range map[state]state{
		adding: adding, addingLocal: adding,
		attachedLocal: attachedPending, attachedPatched: attachedPending, attachedPending: attachedPending, attachedStored: attachedStored, attachedFenced: attachedFenced,
		releasing: releasing, releasingLocal: releasing, releasingPatched: releasing, releasingDisowned: releasingDisowned,
		detached: releasing, detachedLocal: releasing, detachedPatched: releasing, detachedDisowned: releasingDisowned,
	} {
		got, ok := s.disk().state(s == attachedFenced)
		if !ok || got != want {
			t.Errorf("%s is read again as %s, want %s", s, got, want)
		}
	}
}

// oldRecord is what versions before this one know of a record on disk.
type oldRecord struct {
	Version   int       `json:"version"`
	State     string    `json:"state"`
	Device    string    `json:"device"`
	Addresses []Address `json:"addresses"`
	Queued    bool      `json:"queued"`
	Stale     bool      `json:"stale"`
	Lost      string    `json:"lost"`
	Disowned  bool      `json:"disowned"`
}

// Records as earlier versions wrote them are read, and what is written now those
// versions read: a daemon may be rolled back.
func TestRecordsOfOtherVersions(t *testing.T) {
	t.Parallel()
	const names = `"version":1,"network":"net1","containerID":"c1","interface":"eth0","orchestrator":"k8s","namespace":"ns1","pod":"web-0",` +
		`"since":"2026-11-22T10:00:00Z","netns":"/run/netns/x","device":"cali1","mac":"aa:bb:cc:dd:ee:ff","mtu":1450,` +
		`"addresses":[{"addr":"10.0.0.1","gateway":"169.254.1.1","block":"10.0.0.0/26"}]`
	for _, tt := range []struct {
		flags string
		want  state
		old   oldRecord
	}{
		{`"state":"adding"`, adding, oldRecord{State: "adding"}},
		// That ADD got its address from the reserve is of no use after a start.
		{`"state":"adding","queued":true,"claims":["10.0.0.1"]`, adding, oldRecord{State: "adding"}},
		{`"state":"attached"`, attachedStored, oldRecord{State: "attached"}},
		{`"state":"attached","endpointRevision":17`, attachedStored, oldRecord{State: "attached"}},
		{`"state":"attached","queued":true,"claims":["10.0.0.1"]`, attachedPending, oldRecord{State: "attached", Queued: true}},
		{`"state":"attached","queued":true,"stale":true,"former":["10.0.0.9"]`, attachedPending, oldRecord{State: "attached", Queued: true, Stale: true}},
		{`"state":"attached","lost":"net1.c9"`, attachedFenced, oldRecord{State: "attached", Lost: "net1.c9"}},
		{`"state":"releasing"`, releasing, oldRecord{State: "releasing"}},
		{`"state":"releasing","queued":true`, releasing, oldRecord{State: "releasing"}},
		{`"state":"releasing","lost":"net1.c9"`, releasing, oldRecord{State: "releasing", Lost: "net1.c9"}},
		{`"state":"releasing","disowned":true`, releasingDisowned, oldRecord{State: "releasing", Disowned: true}},
	} {
		r, err := parseRecord([]byte("{" + names + "," + tt.flags + "}"))
		if err != nil {
			t.Errorf("%s: %v", tt.flags, err)
			continue
		}
		if r.State != tt.want {
			t.Errorf("%s: read as %s, want %s", tt.flags, r.State, tt.want)
		}
		if !r.Since.Equal(time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)) || r.MTU != 1450 || r.Pod != "web-0" || len(r.Addresses) != 1 {
			t.Errorf("%s: read as %+v", tt.flags, r)
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var old oldRecord
		if err := json.Unmarshal(b, &old); err != nil {
			t.Fatal(err)
		}
		tt.old.Version, tt.old.Device, tt.old.Addresses = 1, "cali1", r.Addresses
		if d := cmp.Diff(fmt.Sprint(tt.old), fmt.Sprint(old)); d != "" {
			t.Errorf("%s: an earlier version reads (-want +got):\n%s", tt.flags, d)
		}
		if again, err := parseRecord(b); err != nil || again.State != r.State || !slices.Equal(again.Claims, r.Claims) || !slices.Equal(again.Former, r.Former) {
			t.Errorf("%s: written and read again: %+v, %v", tt.flags, again, err)
		}
	}
	for _, flags := range []string{`"state":"gone"`, `"state":""`, `"queued":true`} {
		if r, err := parseRecord([]byte("{" + names + "," + flags + "}")); err == nil {
			t.Errorf("%s: read as %s", flags, r.State)
		}
	}
}
