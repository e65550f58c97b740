package pgdb

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Exec runs one statement on a connection of the pool. Like Query and QueryRow it waits for the
// connection at most as long as Acquire does.
func (db *DB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	conn, err := db.Acquire(ctx)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	defer conn.Release()
	return conn.Exec(ctx, sql, args...)
}

// Query runs one statement and returns its rows, which hold a connection until they are closed or
// read to their end.
func (db *DB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	conn, err := db.Acquire(ctx)
	if err != nil {
		return failed{err}, err
	}
	rows, err := conn.Query(ctx, sql, args...)
	if err != nil {
		conn.Release()
		return rows, err
	}
	return &heldRows{Rows: rows, conn: conn}, nil
}

// QueryRow runs one statement whose first row its Scan reads; Scan gives the connection back.
func (db *DB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	conn, err := db.Acquire(ctx)
	if err != nil {
		return failed{err}
	}
	return &heldRow{row: conn.QueryRow(ctx, sql, args...), conn: conn}
}

// heldRows gives its connection back when its rows end.
type heldRows struct {
	pgx.Rows
	conn *pgxpool.Conn
}

func (r *heldRows) Close() {
	r.Rows.Close()
	if r.conn != nil {
		r.conn.Release()
		r.conn = nil
	}
}

func (r *heldRows) Next() bool {
	more := r.Rows.Next()
	if !more {
		r.Close()
	}
	return more
}

type heldRow struct {
	row  pgx.Row
	conn *pgxpool.Conn
}

func (r *heldRow) Scan(dest ...any) error {
	if r.conn != nil {
		defer func() {
			r.conn.Release()
			r.conn = nil
		}()
	}
	return r.row.Scan(dest...)
}

// failed is the rows or the row of a pool that gave no connection.
type failed struct{ err error }

func (f failed) Close()                                       {}
func (f failed) Err() error                                   { return f.err }
func (f failed) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (f failed) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (f failed) Next() bool                                   { return false }
func (f failed) Scan(...any) error                            { return f.err }
func (f failed) Values() ([]any, error)                       { return nil, f.err }
func (f failed) RawValues() [][]byte                          { return nil }
func (f failed) Conn() *pgx.Conn                              { return nil }
func (f failed) TypeMap() *pgtype.Map                         { return nil }
