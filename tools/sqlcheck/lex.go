package main

import "strings"

// A word is one token of a statement: an identifier or keyword, a parameter with its @, or a sign.
type word struct {
	text  string // identifiers as PostgreSQL folds them
	upper string // for keywords
}

// lex splits a statement into words. Comments go, and a text literal or number becomes the sign '.
// It knows as much of PostgreSQL's lexer as is needed to find names.
func lex(sql string) []word {
	var words []word
	add := func(text string) { words = append(words, word{text, strings.ToUpper(text)}) }
	for i := 0; i < len(sql); {
		rest := sql[i:]
		switch c := sql[i]; {
		case strings.HasPrefix(rest, "--"):
			i += until(rest, "\n", 0)
		case strings.HasPrefix(rest, "/*"):
			i += until(rest, "*/", 2)
		case c == '\'':
			i += quoted(rest, '\'')
			add("'")
		case c == '$' && dollarTag(rest) != "":
			tag := dollarTag(rest)
			i += until(rest, tag, len(tag))
			add("'")
		case c == '"':
			n := quoted(rest, '"')
			add(strings.ReplaceAll(strings.Trim(rest[:n], `"`), `""`, `"`))
			i += n
		case isNameStart(c) || c == '@' && len(rest) > 1 && isNameStart(rest[1]):
			n := 1
			for n < len(rest) && (isNameStart(rest[n]) || rest[n] >= '0' && rest[n] <= '9' || rest[n] == '$') {
				n++
			}
			add(strings.ToLower(rest[:n]))
			i += n
		case c >= '0' && c <= '9':
			n := 1
			for n < len(rest) && (rest[n] >= '0' && rest[n] <= '9' || rest[n] == '.') {
				n++
			}
			add("'")
			i += n
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			i++
		default:
			add(string(c))
			i++
		}
	}
	return words
}

func isNameStart(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c >= 0x80
}

// until returns how many bytes end with the next end after from; all, where it is missing.
func until(s, end string, from int) int {
	if n := strings.Index(s[from:], end); n >= 0 {
		return from + n + len(end)
	}
	return len(s)
}

// quoted returns the length of the literal s begins with; a doubled quote is part of it.
func quoted(s string, quote byte) int {
	for i := 1; i < len(s); i++ {
		if s[i] != quote {
			continue
		}
		if i+1 < len(s) && s[i+1] == quote {
			i++
			continue
		}
		return i + 1
	}
	return len(s)
}

// dollarTag returns the $tag$ that s begins with, or "".
func dollarTag(s string) string {
	for i := 1; i < len(s); i++ {
		if s[i] == '$' {
			return s[:i+1]
		}
		if !isNameStart(s[i]) {
			return ""
		}
	}
	return ""
}

// Use is one table in a statement.
type Use struct {
	Table string
	Write bool
}

// uses returns the tables among known that a statement names, each once, in the order they come up;
// one that is read and written counts as written. Names that WITH introduces hide tables.
func uses(sql string, known map[string]bool) []Use {
	words := lex(sql)
	at := reader(words)
	hidden := introduced(words)
	var found []Use
	place := map[string]int{}
	for i, w := range words {
		if !known[w.text] {
			continue
		}
		if at(i+1) == "." || at(i-1) == "AS" {
			continue // a use of a name that FROM brought in, or a new name
		}
		last := i - 1 // the word before the table and its schema
		switch {
		case at(last) == "." && at(last-1) == "PUBLIC":
			last -= 2
		case at(last) == ".":
			continue // a column
		case hidden[w.text]:
			continue
		}
		if at(last) == "ONLY" {
			last--
		}
		var write bool
		switch at(last) {
		case "INTO", "TRUNCATE", "TABLE":
			write = true
		case "UPDATE":
			write = at(last-1) != "FOR"
		case "FROM":
			write = at(last-1) == "DELETE"
		}
		if n, ok := place[w.text]; ok {
			found[n].Write = found[n].Write || write
			continue
		}
		place[w.text] = len(found)
		found = append(found, Use{w.text, write})
	}
	return found
}

// reader returns words by number, in capitals; "" before the first and after the last.
func reader(words []word) func(int) string {
	return func(i int) string {
		if i < 0 || i >= len(words) {
			return ""
		}
		return words[i].upper
	}
}

// introduced returns the names that WITH gives to queries.
func introduced(words []word) map[string]bool {
	at := reader(words)
	names := map[string]bool{}
	for i, w := range words {
		if (at(i-1) == "WITH" || at(i-1) == "RECURSIVE" || at(i-1) == ",") && at(i+1) == "AS" &&
			(at(i+2) == "(" || at(i+2) == "MATERIALIZED" || at(i+2) == "NOT") {
			names[w.text] = true
		}
	}
	return names
}

// selectsAll reports whether a statement asks for * instead of naming its columns. A query that WITH
// introduces has named them, and so has an alias with a list: AS beat (id, seq).
func selectsAll(sql string) bool {
	words := lex(sql)
	at := reader(words)
	named := introduced(words)
	for i, w := range words {
		if at(i-1) == "AS" && at(i+1) == "(" {
			named[w.text] = true
		}
	}
	for i, w := range words {
		if w.text != "*" {
			continue
		}
		switch at(i - 1) {
		case "SELECT", "DISTINCT", "ALL", "RETURNING", ",":
			return true
		case ".":
			if i < 2 || !named[words[i-2].text] {
				return true
			}
		}
	}
	return false
}
