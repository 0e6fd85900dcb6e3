"""Plans, descriptors, formats and the types that all layers share. Imports no op and no backend."""
