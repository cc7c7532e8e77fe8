"""What is in a store, as text, charts and a page. Imports `store` and `data`."""
