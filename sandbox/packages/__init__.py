"""The packages that a call asks for: read, screened, and installed where the code will find them."""
