package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// docsPackage stands for the pages: what readers are told to run may read every table and write none.
const docsPackage = "docs"

// scanDocs returns the statements in the ```sql blocks of the pages below root/docs.
func scanDocs(root string) ([]Statement, error) {
	var statements []Statement
	err := filepath.WalkDir(filepath.Join(root, "docs"), func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(name) != ".md" {
			return err
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		statements = append(statements, sqlBlocks(filepath.ToSlash(relative), string(text))...)
		return nil
	})
	return statements, err
}

// sqlBlocks returns the blocks of one page; each is one statement.
func sqlBlocks(page, text string) []Statement {
	var found []Statement
	var block strings.Builder
	begun := 0 // the line on which the block began, 0 outside
	number := 0
	for line := range strings.Lines(text) {
		number++
		switch mark := strings.TrimSpace(line); {
		case begun == 0 && mark == "```sql":
			begun = number
			block.Reset()
		case begun > 0 && mark == "```":
			statement := strings.TrimSuffix(strings.TrimSpace(block.String()), ";")
			found = append(found, Statement{docsPackage, "the block", fmt.Sprintf("%s:%d", page, begun), statement})
			begun = 0
		case begun > 0:
			block.WriteString(line)
		}
	}
	return found
}
