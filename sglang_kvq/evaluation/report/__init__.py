"""Files that `kvq eval` writes from results: JSON (`results`), rows per value (`rows`), Markdown (`page`), `plots`."""
