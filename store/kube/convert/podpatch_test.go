package convert

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// TestPatches: what is written to a pod is what Calico's plugin writes, and the key
// of a secret survives the way there and back.
func TestPatches(t *testing.T) {
	t.Parallel()
	w := &store.WorkloadEndpoint{ObjectMeta: metav1.ObjectMeta{UID: "u"}, Spec: store.WorkloadEndpointSpec{ContainerID: "c", IPNetworks: []string{"10.0.0.1/32", "fd00::1/128"}}}
	got, err := PodPatch(w)
	if want := `{"metadata":{"annotations":{"cni.projectcalico.org/containerID":"c","cni.projectcalico.org/podIP":"10.0.0.1/32","cni.projectcalico.org/podIPs":"10.0.0.1/32,fd00::1/128"},"uid":"u"}}`; err != nil || string(got) != want {
		t.Errorf("%s, %v, want %s", got, err, want)
	}
	got, err = PodEndPatch("c")
	if want := `[{"op":"test","path":"/metadata/annotations/cni.projectcalico.org~1containerID","value":"c"},{"op":"add","path":"/metadata/annotations/cni.projectcalico.org~1podIP","value":""},{"op":"add","path":"/metadata/annotations/cni.projectcalico.org~1podIPs","value":""}]`; err != nil || string(got) != want {
		t.Errorf("%s, %v, want %s", got, err, want)
	}

	key, src := store.SecretKey("reach"), Secrets(V3)
	raw, err := store.Encode(key, &store.Secret{Key: []byte("0123456789")}, nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := src.Write(key, SecretName(key), 7, raw)
	if err != nil {
		t.Fatal(err)
	}
	o, err := src.Read(body)
	if err != nil || o.Key != key || o.Revision != 7 || string(o.Raw) != string(raw) {
		t.Errorf("%s came back as %+v, %v", raw, o, err)
	}
}
