module github.com/routerd/routerd/network-policy-api

go 1.26.0

tool sigs.k8s.io/network-policy-api/conformance

require sigs.k8s.io/network-policy-api v0.2.0 // indirect
