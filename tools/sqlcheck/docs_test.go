package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestBlocksOfSQLAreStatements(t *testing.T) {
	t.Parallel()
	page := "# Page\n\n```sql\nSELECT 1\nFROM   x;\n```\n\n```\nmake x\n```\n\n```sql\nSELECT 2;\n```\n"
	want := []Statement{
		{docsPackage, "the block", "docs/x.md:3", "SELECT 1\nFROM   x"},
		{docsPackage, "the block", "docs/x.md:12", "SELECT 2"},
	}
	if diff := cmp.Diff(want, sqlBlocks("docs/x.md", page)); diff != "" {
		t.Errorf("sqlBlocks (-want +got):\n%s", diff)
	}
}
