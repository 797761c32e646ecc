//go:build tools

// Package tools names the program etcd.
package tools

import _ "go.etcd.io/etcd/server/v3"
