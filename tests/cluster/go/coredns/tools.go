//go:build tools

// Package tools names the program CoreDNS.
package tools

import _ "github.com/coredns/coredns"
