// Package pglocal runs a private PostgreSQL from binaries of this machine: for development, for one
// machine, for tests. The server listens on a unix socket in a private folder and on no port, so
// nothing collides and nobody else gets in; whoever can open the socket may log in as any role.
//
// The data folder is never deleted, and never opened with binaries of another major version. Where
// this process is root, which PostgreSQL refuses, the server runs as another user.
//
// What can go wrong, and what comes back:
//
//	no binaries, or too old                     ErrNoBinaries, naming the package to install
//	data of another major version               ErrVersion, naming both
//	a folder that is no data folder             an error; nothing is touched
//	a live server on the same folder            ErrRunning, naming its process
//	a postmaster.pid left over by a crash       removed, if its process is not that server
//	a folder the server's user cannot reach     an error naming the folder and its mode
//	this process is killed                      with DieWithParent a guard process ends the server
package pglocal
