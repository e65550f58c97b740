package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
)

// maxFileLines is the length from which a file holds more than one thought.
const maxFileLines = 600

// checkFile returns what is wrong with one Go file. Generated files may be as long as they like.
func checkFile(name string) ([]string, error) {
	source, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, shortName(name), source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("parse: %w", err)
	}
	if ast.IsGenerated(file) {
		return nil, nil
	}
	var breaches []string
	if lines := bytes.Count(source, []byte("\n")); lines > maxFileLines {
		breaches = append(breaches, fmt.Sprintf("%s: %d lines, and %d is the limit, because a page that is not read is not reviewed",
			shortName(name), lines, maxFileLines))
	}
	if strings.HasSuffix(name, "_test.go") {
		return breaches, nil // a test may look at the words that people get
	}
	for _, at := range errorTexts(file) {
		breaches = append(breaches, fmt.Sprintf("%s: an error is asked by its text, because texts change: use errors.Is, errors.AsType, a SQLSTATE or a constraint's name",
			files.Position(at)))
	}
	return breaches, nil
}

// errorTexts finds the places where the text of an error decides something: as an argument of a
// search in strings, bytes or regexp, in a comparison, or as what a switch asks.
func errorTexts(file *ast.File) []token.Pos {
	var found []token.Pos
	note := func(expressions ...ast.Expr) {
		for _, e := range expressions {
			if at := errorCall(e); at.IsValid() {
				found = append(found, at)
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if selector, ok := n.Fun.(*ast.SelectorExpr); ok && searches(selector) {
				note(n.Args...)
			}
		case *ast.BinaryExpr:
			if n.Op == token.EQL || n.Op == token.NEQ {
				note(n.X, n.Y)
			}
		case *ast.SwitchStmt:
			if n.Tag != nil {
				note(n.Tag)
			}
		}
		return true
	})
	return found
}

// searches reports whether a call through selector looks for something in a text.
func searches(selector *ast.SelectorExpr) bool {
	if strings.HasPrefix(selector.Sel.Name, "Match") || strings.HasPrefix(selector.Sel.Name, "Find") {
		return true // methods of regular expressions, whatever the variable is called
	}
	pkg, ok := selector.X.(*ast.Ident)
	if !ok || pkg.Name != "strings" {
		return false
	}
	for _, verb := range []string{"Contains", "HasPrefix", "HasSuffix", "Index", "LastIndex", "EqualFold", "Cut", "Split", "Count", "Compare"} {
		if strings.HasPrefix(selector.Sel.Name, verb) {
			return true
		}
	}
	return false
}

// errorCall returns the position of x.Error() in an expression, through conversions and calls that keep
// the text, such as strings.ToLower.
func errorCall(e ast.Expr) token.Pos {
	call, ok := ast.Unparen(e).(*ast.CallExpr)
	if !ok {
		return token.NoPos
	}
	if selector, ok := call.Fun.(*ast.SelectorExpr); ok && selector.Sel.Name == "Error" && len(call.Args) == 0 {
		return call.Pos()
	}
	for _, argument := range call.Args {
		if at := errorCall(argument); at.IsValid() {
			return at
		}
	}
	return token.NoPos
}

// shortName is name below the working directory, where it is.
func shortName(name string) string {
	dir, err := os.Getwd()
	if err != nil {
		return name
	}
	if short, err := filepath.Rel(dir, name); err == nil && filepath.IsLocal(short) {
		return short
	}
	return name
}
