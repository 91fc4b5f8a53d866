package ui

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// guard lets through what comes from a browser on this host, or at the near end of an ssh -L.
func guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		// Nothing from outside, and nothing of ours inside a page of others.
		h.Set("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		if err := checkSource(r); err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// checkSource returns an error if the request was made by the page of another site. That site's name may lead to a
// loopback address (DNS rebinding), so the Host must be a name of the loopback; and what a browser says of where a
// request comes from (RFC 6454 section 7, Fetch Metadata) must be this page.
func checkSource(r *http.Request) error {
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	a, err := netip.ParseAddr(strings.Trim(host, "[]"))
	if host != "localhost" && (err != nil || !a.Unmap().IsLoopback()) {
		return fmt.Errorf("host %q: the page is reached as localhost or by a loopback address alone", r.Host)
	}
	if o, ok := r.Header["Origin"]; ok && (len(o) != 1 || o[0] != "http://"+r.Host) {
		return fmt.Errorf("origin %q: the page answers its own requests alone", o)
	}
	switch site := r.Header.Get("Sec-Fetch-Site"); site {
	case "", "same-origin", "none":
	default:
		// A link in another page may open this one, where the browser has no cookie for it.
		if r.URL.Path != "/" || r.Header.Get("Sec-Fetch-Mode") != "navigate" {
			return fmt.Errorf("a request from another site (%s): the page answers its own requests alone", site)
		}
	}
	return nil
}
