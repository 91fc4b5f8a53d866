// Command cyclonus says by cyclonus' reading of NetworkPolicy what becomes of connections: another program's
// verdicts beside which those of routerd are put (control/policy, TestKubernetesPolicies).
//
// It reads questions from standard input and answers each in turn on standard output, as JSON.
package main

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"

	"github.com/mattfenwick/cyclonus/pkg/matcher"
	"github.com/sirupsen/logrus"
	networkingv1 "k8s.io/api/networking/v1"
)

type question struct {
	Policies []*networkingv1.NetworkPolicy
	Traffic  []*matcher.Traffic
}

// answer has for each connection what is said at its destination and at its source.
type answer struct{ Ingress, Egress bool }

func main() {
	logrus.SetOutput(io.Discard)
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var q question
		if err := in.Decode(&q); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		policy := matcher.BuildNetworkPolicies(true, q.Policies)
		answers := make([]answer, 0, len(q.Traffic))
		for _, t := range q.Traffic {
			r := policy.IsTrafficAllowed(t)
			answers = append(answers, answer{r.Ingress.IsAllowed(), r.Egress.IsAllowed()})
		}
		if err := out.Encode(answers); err != nil {
			log.Fatal(err)
		}
	}
}
