"""What a store contains, as text, charts and a page. Imports `store` and `data`."""
