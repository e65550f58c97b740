// Package schema tests what the migrations promise as a whole: that each can be taken back and
// applied again, that ten replicas may apply them at once, that no role can write what is not its
// own, and that the named constraints hold. It has no code of its own.
package schema
