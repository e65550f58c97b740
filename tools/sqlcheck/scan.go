package main

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Statement is one SQL constant of the product.
type Statement struct {
	Package string // import path
	Name    string
	At      string // file:line, relative to the root
	SQL     string
}

// Finding is something a reviewer would have to object to.
type Finding struct {
	At   string
	What string
}

func (f Finding) String() string { return f.At + ": " + f.What }

// runners are the methods of pgx whose text argument is SQL.
var runners = []string{"Exec", "Query", "QueryRow", "Queue", "Prepare"}

// scan reads every Go file of a module below root/dir, but for tests, generated code and testdata,
// and returns the constants whose name ends in SQL. The findings are statements that hide from it.
func scan(root, dir string) ([]Statement, []Finding, error) {
	var statements []Statement
	var findings []Finding
	folders := map[string][]string{}
	err := filepath.WalkDir(filepath.Join(root, dir), func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if base := entry.Name(); base == "testdata" || base == "pinned" || strings.HasPrefix(base, ".") {
				return fs.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
			folders[filepath.Dir(name)] = append(folders[filepath.Dir(name)], name)
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	for folder, names := range folders {
		relative, err := filepath.Rel(root, folder)
		if err != nil {
			return nil, nil, err
		}
		found, objections, err := scanPackage(root, path.Join("berth", filepath.ToSlash(relative)), names)
		if err != nil {
			return nil, nil, err
		}
		statements = append(statements, found...)
		findings = append(findings, objections...)
	}
	slices.SortFunc(statements, func(a, b Statement) int { return strings.Compare(a.At, b.At) })
	slices.SortFunc(findings, func(a, b Finding) int { return strings.Compare(a.At, b.At) })
	return statements, findings, nil
}

// scanPackage does for one package what scan does for a module.
func scanPackage(root, importPath string, names []string) ([]Statement, []Finding, error) {
	positions := token.NewFileSet()
	var files []*ast.File
	for _, name := range names {
		source, err := os.ReadFile(name)
		if err != nil {
			return nil, nil, err
		}
		relative, err := filepath.Rel(root, name)
		if err != nil {
			return nil, nil, err
		}
		file, err := parser.ParseFile(positions, relative, source, parser.SkipObjectResolution|parser.ParseComments)
		if err != nil {
			return nil, nil, fmt.Errorf("parse: %w", err)
		}
		if !ast.IsGenerated(file) {
			files = append(files, file)
		}
	}

	p := pkg{importPath: importPath, positions: positions, values: map[string]string{}}
	for _, file := range files {
		ast.Inspect(file, p.collect)
	}
	for _, file := range files {
		ast.Inspect(file, p.judge)
	}
	return p.statements, p.findings, nil
}

// pkg is one package being read.
type pkg struct {
	importPath string
	positions  *token.FileSet
	values     map[string]string // every constant text by name, for those made of others
	statements []Statement
	findings   []Finding
}

// collect remembers constant texts. A constant made of others is read in judge, when all are known.
func (p *pkg) collect(n ast.Node) bool {
	declaration, ok := n.(*ast.GenDecl)
	if !ok || declaration.Tok != token.CONST {
		return true
	}
	for _, spec := range declaration.Specs {
		if spec, ok := spec.(*ast.ValueSpec); ok && len(spec.Names) == len(spec.Values) {
			for i, name := range spec.Names {
				if text, ok := p.text(spec.Values[i]); ok {
					p.values[name.Name] = text
				}
			}
		}
	}
	return true
}

// judge takes the statements and objects to SQL that has no name.
func (p *pkg) judge(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.GenDecl:
		for _, spec := range n.Specs {
			if spec, ok := spec.(*ast.ValueSpec); ok {
				p.declared(n.Tok, spec)
			}
		}
	case *ast.CallExpr:
		p.called(n)
	}
	return true
}

func (p *pkg) declared(kind token.Token, spec *ast.ValueSpec) {
	for i, name := range spec.Names {
		if !strings.HasSuffix(name.Name, "SQL") || name.Name == "SQL" {
			continue
		}
		if kind != token.CONST || i >= len(spec.Values) {
			p.object(name, name.Name+" is no constant, so nothing can prepare it")
			continue
		}
		text, ok := p.text(spec.Values[i])
		if !ok {
			p.object(name, name.Name+" is not made of text literals, so nothing can prepare it")
			continue
		}
		p.statements = append(p.statements, Statement{p.importPath, name.Name, p.at(name), text})
	}
}

// called objects to a literal given to a method that runs SQL.
func (p *pkg) called(call *ast.CallExpr) {
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !slices.Contains(runners, selector.Sel.Name) {
		return
	}
	for _, argument := range call.Args[:min(len(call.Args), 3)] {
		text, ok := p.text(argument)
		if _, named := ast.Unparen(argument).(*ast.Ident); !ok || named || !isStatement(text) {
			continue
		}
		p.object(argument, "SQL without a name: make it a constant named <verb><Noun>SQL beside the function that runs it")
	}
}

// isStatement tells a statement that names tables from other texts and from SET, BEGIN and the like.
func isStatement(text string) bool {
	tokens := lex(text)
	return len(tokens) > 1 && slices.Contains([]string{"SELECT", "INSERT", "UPDATE", "DELETE", "WITH", "MERGE", "TRUNCATE"}, tokens[0].upper)
}

// text returns the value of an expression of text literals and known constants joined by +.
func (p *pkg) text(e ast.Expr) (string, bool) {
	switch e := ast.Unparen(e).(type) {
	case *ast.BasicLit:
		if e.Kind != token.STRING {
			return "", false
		}
		return constant.StringVal(constant.MakeFromLiteral(e.Value, e.Kind, 0)), true
	case *ast.Ident:
		text, ok := p.values[e.Name]
		return text, ok
	case *ast.BinaryExpr:
		left, ok := p.text(e.X)
		right, ok2 := p.text(e.Y)
		return left + right, ok && ok2 && e.Op == token.ADD
	}
	return "", false
}

func (p *pkg) at(n ast.Node) string {
	position := p.positions.Position(n.Pos())
	return fmt.Sprintf("%s:%d", filepath.ToSlash(position.Filename), position.Line)
}

func (p *pkg) object(n ast.Node, what string) {
	p.findings = append(p.findings, Finding{p.at(n), what})
}
